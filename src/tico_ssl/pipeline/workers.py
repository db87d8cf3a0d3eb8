"""Work done ahead by worker processes, with results in order: decoding images, making a detector's batches.

Processes, because such work holds the GIL often enough to keep a GPU waiting; threads where fork is not available.
Results are sent through a pipe, but pixels are written into a ring buffer in memory that workers inherit from the main
process: no copies, no allocations, and no use of /dev/shm, which is small in containers.
"""

import mmap
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tico_ssl.data.bad_files import in_order
from tico_ssl.runtime.errors import UserError

S = TypeVar("S")
T = TypeVar("T")
MOST_WORKERS = 16  # limit of the default
AHEAD = 2  # items prefetched per worker
ALIGNED = 64  # alignment in bytes of arrays in a slot
CAN_FORK = sys.platform.startswith("linux")  # fork is not safe elsewhere


def default_workers() -> int:
    """One per CPU core of this process, at most `MOST_WORKERS`."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, max(1, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def ahead(
    work: Callable[[S], T], items: Iterable[S], workers: int, processes: bool = CAN_FORK, setting: str = "workers"
) -> Iterator[T]:
    """`work` of every item, in order. `setting` is the name of the number of workers in error messages."""
    if not processes:
        with ThreadPoolExecutor(workers) as pool:
            yield from in_order(pool, work, items, AHEAD * workers)
        return
    try:
        for done in _forked(work, items, workers):
            if isinstance(done, UserError):
                raise done
            yield done
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a worker process died ({str(error).splitlines()[0]}); if memory is short, lower {setting} (now {workers})"
        ) from error


def _forked(work: Callable[[S], T], items: Iterable[S], workers: int) -> Iterator[T | UserError]:
    with warnings.catch_warnings():
        # The number of workers is the user's choice; the default does not exceed the CPU cores.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Work(work),
            batch_size=None,
            sampler=items,
            num_workers=workers,
            prefetch_factor=AHEAD,
            multiprocessing_context="fork",
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
        )
        return iter(loader)


class _Work(Dataset[T | UserError], Generic[S, T]):
    """The work of a worker. A UserError is returned as a value: raised in the worker, its message would contain a
    traceback."""

    def __init__(self, work: Callable[[S], T]) -> None:
        self.work = work

    def __getitem__(self, item: S) -> T | UserError:
        try:
            return self.work(item)
        except UserError as error:
            return UserError(str(error))


def _start_worker(_: int) -> None:
    """Leave signals to the main process: a fork inherits its handlers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_it_is(done: T) -> T:
    """Results need no collation."""
    return done


@contextmanager
def shared_ring(slots: int, capacity: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Memory (slots, bytes) shared with forked processes; page-locked for a GPU, if one is given, so that copies
    overlap with computation."""
    memory = mmap.mmap(-1, max(1, slots * capacity))
    ring = torch.frombuffer(memory, dtype=torch.uint8)[: slots * capacity].view(slots, capacity)
    on_gpu = device is not None and device.type == "cuda"
    registered = on_gpu and int(_cuda().cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)) == 0
    try:
        yield ring
    finally:
        if registered:
            torch.cuda.synchronize(device)
            _cuda().cudaHostUnregister(ring.data_ptr())


def arrays_ahead(
    work: Callable[[int], list[np.ndarray]], numbers: range, workers: int, capacity: int
) -> Iterator[list[np.ndarray]]:
    """`work` of every number, in order: lists of arrays, of which up to `capacity` bytes are shared instead of piped.
    They are valid until the next list is requested, which may overwrite them."""
    slots = AHEAD * workers + 2  # one in use, one spare, the others written ahead
    with shared_ring(slots, capacity) as memory:
        ring = memory.numpy()

        def stored(number: int) -> list["np.ndarray | _Stored"]:
            return _stored(work(number), ring[(number - numbers.start) % slots])

        for number, kept in zip(numbers, ahead(stored, numbers, workers), strict=True):
            slot = ring[(number - numbers.start) % slots]
            yield [one.found_in(slot) if isinstance(one, _Stored) else one for one in kept]


class _Stored(NamedTuple):
    """Position of an array in a slot."""

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def found_in(self, slot: np.ndarray) -> np.ndarray:
        """The array."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return slot[self.begin : self.begin + size].view(self.dtype).reshape(self.shape)


def _stored(arrays: list[np.ndarray], slot: np.ndarray) -> list["np.ndarray | _Stored"]:
    """Write arrays into a slot, one after the other; those that do not fit are returned as they are."""
    begin, kept = 0, list["np.ndarray | _Stored"]()
    for array in arrays:
        if begin + array.nbytes > len(slot):
            kept.append(array)
            continue
        place = _Stored(begin, array.dtype, array.shape)
        place.found_in(slot)[...] = array
        kept.append(place)
        begin += -(-array.nbytes // ALIGNED) * ALIGNED
    return kept


def _cuda() -> Any:
    return torch.cuda.cudart()
