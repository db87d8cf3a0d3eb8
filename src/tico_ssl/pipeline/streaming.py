"""Files decoded ahead by worker processes, in order, and handed over in batches on the device.

Workers write into a ring of batches in memory that they share with the main process (see `workers`). On a GPU's side
the ring is registered, so batches travel while the GPU computes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.source import Source
from tico_ssl.pipeline.workers import AHEAD, CAN_FORK, ahead, shared_ring

CHUNK = 32  # images that a worker does at a time, at most

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
        self.processes = CAN_FORK
        self.name = f"decoded by {workers} {'processes' if self.processes else 'threads'}"

    def batches(self, tasks: Iterable[Task]) -> Iterator[tuple[Tensor, ...]]:
        """One batch for each task, as tensors (N, C, H, W). On a CPU a batch is overwritten some time after the next
        one has been asked for."""
        pieces_per_batch = -(-self.batch_size // self.chunk)
        slots = 2 + -(-AHEAD * self.workers // pieces_per_batch)  # one is in use, the others are written ahead
        sent: list[torch.cuda.Event | None] = [None] * slots
        with shared_ring(slots, self.batch_size * self.bytes_per_image, self.device) as memory:
            ring = memory.view(slots, self.batch_size, self.bytes_per_image)
            work = _Decoding(self.source, self.prepare, ring)
            pieces = self._pieces(tasks, sent)
            for done in ahead(work, pieces, self.workers, self.processes, "training.workers"):
                self.bad.reasons |= {name: reason for name, reason in done.bad.items() if name not in self.bad.reasons}
                if done.end == self.batch_size:
                    batch = columns(ring[done.slot], done.layouts)
                    moved = tuple(column.to(self.device, non_blocking=True) for column in batch)
                    if self.device.type == "cuda":
                        sent[done.slot] = event = torch.cuda.Event()
                        event.record()
                    yield moved

    def _pieces(self, tasks: Iterable[Task], sent: list[torch.cuda.Event | None]) -> Iterator[Piece]:
        """Cut tasks into pieces, as the workers ask for them. A batch is written over when it has been sent."""
        for number, task in enumerate(tasks):
            slot = number % len(sent)
            if (event := sent[slot]) is not None:
                event.synchronize()
            for begin in range(0, self.batch_size, self.chunk):
                part = slice(begin, begin + self.chunk)
                yield Piece(Task(task.places[part], task.parameters[part]), slot, begin)


class _Decoding:
    """What a worker does: decode images, prepare each one, and write it to its place."""

    def __init__(self, source: Source, prepare: Prepare, ring: Tensor) -> None:
        self.source, self.prepare, self.ring = source, prepare, ring

    def __call__(self, piece: Piece) -> Done:
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
