"""Files decoded ahead by worker processes, in order, whatever the number of workers.

Processes, because a decoding thread holds Python's lock often enough to make a GPU wait; threads where processes cannot
be forked. Workers write into memory that they inherit from the main process, batch after batch in a ring, so nothing is
copied or allocated on the way, and /dev/shm, which containers keep small, is not used. On a GPU's side the ring is
registered, so batches travel while the GPU computes.
"""

import mmap
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tico_ssl.data.bad_files import BadFiles, in_order, readable
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError

MOST_WORKERS = 16  # by default
CHUNK = 32  # images that a worker does at a time, at most
AHEAD = 2  # chunks that each worker may be ahead

# The user may know better, and the default is the number of processors anyway.
warnings.filterwarnings("ignore", message="This DataLoader will create")

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Task(NamedTuple):
    """Images to decode, and what `prepare` is to know about each. Arrays, since tensors would be sent as files."""

    places: np.ndarray
    parameters: np.ndarray


class Piece(NamedTuple):
    """A part of a task, and where its images go: which batch of the ring, from which row on."""

    task: Task
    slot: int
    begin: int


class Layout(NamedTuple):
    """How a prepared tensor (C, H, W) lies in memory: its sizes in that order, and whether channels come last. Decoders
    write them so, and to reorder pixels costs as much as a crop."""

    shape: tuple[int, ...]
    channels_last: bool


class Done(NamedTuple):
    """A piece carried out: how what was prepared lies in memory, and what was wrong with which file."""

    slot: int
    end: int
    layouts: list[Layout]
    bad: dict[str, str]


class Stream:
    """Decodes images of a source and hands them over in batches on the device, prepared.

    `prepare` turns an image and its parameters into uint8 tensors (C, H, W), whose shapes are the same for all images
    and which take `bytes_per_image` together.
    """

    def __init__(
        self,
        source: Source,
        prepare: Prepare,
        bytes_per_image: int,
        batch_size: int,
        workers: int,
        device: torch.device,
        bad: BadFiles,
    ) -> None:
        self.source, self.prepare, self.bytes_per_image = source, prepare, bytes_per_image
        self.batch_size, self.workers, self.device, self.bad = batch_size, workers, device, bad
        self.chunk = min(CHUNK, -(-batch_size // workers))
        self.processes = sys.platform.startswith("linux")  # elsewhere a fork is not safe
        self.name = f"decoded by {workers} {'processes' if self.processes else 'threads'}"

    def batches(self, tasks: Iterable[Task]) -> Iterator[tuple[Tensor, ...]]:
        """One batch for each task, as tensors (N, C, H, W). On a CPU a batch is overwritten some time after the next
        one has been asked for."""
        pieces_per_batch = -(-self.batch_size // self.chunk)
        slots = 2 + -(-AHEAD * self.workers // pieces_per_batch)  # one is in use, the others are written ahead
        with self._ring(slots) as ring:
            run = self._by_processes if self.processes else self._by_threads
            sent: list[Any] = [None] * slots
            for done in run(_Decoding(self.source, self.prepare, ring), self._pieces(tasks, sent)):
                self.bad.reasons |= {name: reason for name, reason in done.bad.items() if name not in self.bad.reasons}
                if done.end == self.batch_size:
                    batch = columns(ring[done.slot], done.layouts)
                    moved = tuple(column.to(self.device, non_blocking=True) for column in batch)
                    if self.device.type == "cuda":
                        sent[done.slot] = torch.cuda.Event()
                        sent[done.slot].record()
                    yield moved

    def _pieces(self, tasks: Iterable[Task], sent: list[Any]) -> Iterator[Piece]:
        """Cut tasks into pieces, as the workers ask for them. A batch is written over when it has been sent."""
        for number, task in enumerate(tasks):
            slot = number % len(sent)
            if sent[slot] is not None:
                sent[slot].synchronize()
            for begin in range(0, self.batch_size, self.chunk):
                part = slice(begin, begin + self.chunk)
                yield Piece(Task(task.places[part], task.parameters[part]), slot, begin)

    @contextmanager
    def _ring(self, slots: int) -> Iterator[Tensor]:
        """Memory (slots, batch, bytes) that forked processes share."""
        shape = (slots, self.batch_size, self.bytes_per_image)
        memory = mmap.mmap(-1, int(np.prod(shape)))
        ring = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
        registered = self.device.type == "cuda" and int(_cuda().cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)) == 0
        try:
            yield ring
        finally:
            if registered:
                torch.cuda.synchronize(self.device)
                _cuda().cudaHostUnregister(ring.data_ptr())

    def _by_threads(self, decoding: "_Decoding", pieces: Iterable[Piece]) -> Iterator[Done]:
        with ThreadPoolExecutor(self.workers) as pool:
            yield from in_order(pool, decoding.__getitem__, pieces, AHEAD * self.workers)

    def _by_processes(self, decoding: "_Decoding", pieces: Iterable[Piece]) -> Iterator[Done]:
        loader = DataLoader(
            decoding,
            batch_size=None,
            sampler=pieces,
            num_workers=self.workers,
            prefetch_factor=AHEAD,
            multiprocessing_context="fork",
            collate_fn=as_it_is,
            worker_init_fn=start_worker,
        )
        try:
            yield from loader
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(
                f"a process that decodes images has died ({str(error).splitlines()[0]}); if memory is short, lower "
                f"training.workers, {self.workers} now"
            ) from error


class _Decoding(Dataset[Done]):
    """What a worker does: decode images, prepare each one, and write it to its place."""

    def __init__(self, source: Source, prepare: Prepare, ring: Tensor) -> None:
        self.source, self.prepare, self.ring = source, prepare, ring

    def __getitem__(self, piece: Piece) -> Done:
        layouts: list[Layout] = []
        rows: list[Tensor] = []
        bad = BadFiles()
        parameters = torch.from_numpy(piece.task.parameters)
        for number, place in enumerate(piece.task.places.tolist()):
            prepared = self.prepare(readable(self.source, place, bad), parameters[number])
            if not layouts:
                layouts = [_layout(tensor) for tensor in prepared]
                rows = [column[piece.begin :] for column in columns(self.ring[piece.slot], layouts)]
            for column, tensor in zip(rows, prepared, strict=True):
                column[number] = tensor
        return Done(piece.slot, piece.begin + len(piece.task.places), layouts, bad.reasons)


def _layout(tensor: Tensor) -> Layout:
    last = not tensor.is_contiguous()
    return Layout(tuple(tensor.permute(1, 2, 0).shape if last else tensor.shape), last)


def columns(slot: Tensor, layouts: list[Layout]) -> list[Tensor]:
    """A batch's memory (N, bytes) as tensors (N, C, H, W), one behind the other."""
    flat, tensors, begin = slot.view(-1), [], 0
    for shape, channels_last in layouts:
        end = begin + len(slot) * int(np.prod(shape))
        tensor = flat[begin:end].view(len(slot), *shape)
        tensors.append(tensor.permute(0, 3, 1, 2) if channels_last else tensor)
        begin = end
    return tensors


def default_workers() -> int:
    """As many as there are processors for this process, within reason."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, max(1, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _cuda() -> Any:
    return torch.cuda.cudart()


def start_worker(_: int) -> None:
    """Leave signals to the main process, whose handlers a fork inherits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def as_it_is(done: Any) -> Any:
    """What collates results that are whole already."""
    return done
