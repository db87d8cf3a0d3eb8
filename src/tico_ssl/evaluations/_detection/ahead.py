"""Work done ahead by other processes, in order: making batches, and turning what was found into masks of pixels.

Processes, because both hold Python's lock for long, and a thread that holds it keeps the GPU waiting; threads where
processes cannot be forked. Results travel through a pipe, large arrays beside it in memory that the processes share.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset

from tico_ssl.data.bad_files import in_order
from tico_ssl.pipeline.streaming import AHEAD, as_it_is, default_workers, start_worker
from tico_ssl.runtime.errors import UserError

T = TypeVar("T")
ALIGNED = 64  # bytes, to which arrays begin


def ahead(work: Callable[[int], T], numbers: range, workers: int | None) -> Iterator[T]:
    """`work` of every number, in order."""
    workers = workers_for(numbers, workers)
    if workers == 0:
        return
    if not sys.platform.startswith("linux"):
        with ThreadPoolExecutor(workers) as pool:
            yield from in_order(pool, work, numbers, AHEAD * workers)
        return
    loader = DataLoader(
        _Work(work),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",
        collate_fn=as_it_is,
        worker_init_fn=start_worker,
    )
    try:
        for done in loader:
            if isinstance(done, UserError):
                raise done
            yield done
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that prepares images has died ({str(error).splitlines()[0]}); if memory is short, lower "
            f"workers, {workers} now"
        ) from error


def workers_for(numbers: range, workers: int | None) -> int:
    """As many as were asked for, or one for each processor, and no more than there is work for."""
    return min(workers or default_workers(), len(numbers))


def arrays_ahead(
    work: Callable[[int], list[np.ndarray]], numbers: range, workers: int | None, capacity: int
) -> Iterator[list[np.ndarray]]:
    """The same for lists of arrays, up to so many bytes of which need no pipe. They hold until the next list is asked
    for: a ring of memory is written over."""
    slots = AHEAD * workers_for(numbers, workers) + 2  # one is in use, one to spare, the others are written ahead
    ring = np.frombuffer(mmap.mmap(-1, max(1, slots * capacity)), np.uint8)[: slots * capacity].reshape(slots, capacity)

    def stored(number: int) -> list[Any]:
        slot, begin = ring[(number - numbers.start) % slots], 0
        kept: list[Any] = []
        for array in work(number):
            place = slot[begin : begin + array.nbytes]
            if len(place) < array.nbytes:
                kept.append(array)
                continue
            place.view(array.dtype).reshape(array.shape)[...] = array
            kept.append(_Stored(begin, array.dtype, array.shape))
            begin += -(-array.nbytes // ALIGNED) * ALIGNED
        return kept

    for number, kept in zip(numbers, ahead(stored, numbers, workers), strict=True):
        slot = ring[(number - numbers.start) % slots]
        yield [one.found_in(slot) if isinstance(one, _Stored) else one for one in kept]


class _Stored(NamedTuple):
    """Where an array lies."""

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def found_in(self, slot: np.ndarray) -> np.ndarray:
        """The array."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return slot[self.begin : self.begin + size].view(self.dtype).reshape(self.shape)


class _Work(Dataset[Any]):
    """What a worker does with a number. What is wrong with the user's data comes back as a value: raised in the worker,
    it would arrive with a traceback in it."""

    def __init__(self, work: Callable[[int], Any]) -> None:
        self.work = work

    def __getitem__(self, number: int) -> Any:
        try:
            return self.work(number)
        except UserError as error:
            return UserError(str(error))
