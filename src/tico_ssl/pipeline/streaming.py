"""Files decoded ahead by worker processes, in order, as batches on the device.

Workers write into a ring buffer of batches in memory shared with the main process (see `workers`). For a GPU the ring
is page-locked, so copies overlap with computation.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.source import Source
from tico_ssl.pipeline.workers import AHEAD, CAN_FORK, ahead, shared_ring
from tico_ssl.runtime.wording import counted

CHUNK = 32  # maximum number of images per work item

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Task(NamedTuple):
    """Images to decode, with parameters for `prepare`. Arrays, since tensors would be sent as files."""

    places: np.ndarray
    parameters: np.ndarray


class Piece(NamedTuple):
    """A part of a task, and where its images go: slot of the ring and first row."""

    task: Task
    slot: int
    begin: int


class Layout(NamedTuple):
    """Memory layout of a prepared tensor (C, H, W): its shape in memory order, and whether that is channels last, as
    decoders write. Reordering pixels would cost as much as a crop."""

    shape: tuple[int, ...]
    channels_last: bool


class Done(NamedTuple):
    """A finished piece: memory layouts of the prepared tensors, and errors by file."""

    slot: int
    end: int
    layouts: list[Layout]
    bad: dict[str, str]


class Stream:
    """Decodes and prepares images of a source, in batches on the device.

    `prepare` turns an image and its parameters into uint8 tensors (C, H, W), of the same shapes for all images and
    `bytes_per_image` in total.
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
        self.name = f"decoded by {counted(workers, 'process' if self.processes else 'thread')}"

    def batches(self, tasks: Iterable[Task]) -> Iterator[tuple[Tensor, ...]]:
        """One batch per task, as tensors (N, C, H, W). On a CPU a batch is valid until the next one is requested."""
        pieces_per_batch = -(-self.batch_size // self.chunk)
        slots = 2 + -(-AHEAD * self.workers // pieces_per_batch)  # one in use, the others written ahead
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
        """Cut tasks into pieces on request. A slot is reused once its batch has been copied to the device."""
        for number, task in enumerate(tasks):
            slot = number % len(sent)
            if (event := sent[slot]) is not None:
                event.synchronize()
            for begin in range(0, self.batch_size, self.chunk):
                part = slice(begin, begin + self.chunk)
                yield Piece(Task(task.places[part], task.parameters[part]), slot, begin)


class _Decoding:
    """The work of a worker: decode images, prepare them, and write them into the ring."""

    def __init__(self, source: Source, prepare: Prepare, ring: Tensor) -> None:
        self.source, self.prepare, self.ring = source, prepare, ring

    def __call__(self, piece: Piece) -> Done:
        layouts: list[Layout] = []
        rows: list[Tensor] = []
        bad = BadFiles()
        parameters = torch.from_numpy(piece.task.parameters)
        if self.source.expect is not None:
            self.source.expect(piece.task.places.tolist())
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
    """A slot's memory (N, bytes) as consecutive tensors (N, C, H, W)."""
    flat, tensors, begin = slot.view(-1), [], 0
    for shape, channels_last in layouts:
        end = begin + len(slot) * int(np.prod(shape))
        tensor = flat[begin:end].view(len(slot), *shape)
        tensors.append(tensor.permute(0, 3, 1, 2) if channels_last else tensor)
        begin = end
    return tensors
