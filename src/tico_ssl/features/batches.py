"""Images of a source in batches on the device, decoded and prepared ahead of the network that takes them.

Worker processes decode images one by one, prepare them, and write float32 rows of a fixed shape into a ring of batches
in shared memory (see `pipeline/workers.py`), page-locked for a GPU. So memory is bounded whatever the size of an image,
and decoding, copying and the network overlap. A few images are decoded by threads, since processes take time to start.
"""

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import current_process
from typing import NamedTuple

import torch
from torch import Tensor

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.pipeline.workers import AHEAD, CAN_FORK, ahead, chosen_workers, shared_ring
from tico_ssl.runtime import distributed

BATCH = 256
CHUNK = 16  # maximum number of images per work item
FEW = 64  # images up to which no processes are started
FEW_THREADS = 4
TOGETHER = 2**22  # bytes of decoded images that a worker prepares at once, unless one alone has more
FLOAT = torch.float32.itemsize

Shape = tuple[int, int, int]
Prepare = Callable[[Tensor | Sequence[Tensor], list[int]], Tensor]
"""From uint8 images and their indices in the source to float32 (N, C, H, W), each independent of the others."""


class Batch(NamedTuple):
    """Prepared images (N, C, H, W) on the device, and their indices in the source."""

    images: Tensor
    places: list[int]


class _Piece(NamedTuple):
    """A part of a batch: indices of its images, and where they go, slot of the ring and first row."""

    places: range
    slot: int
    begin: int


def own_share(source: Source) -> tuple[Source, Tensor]:
    """The images of this process among several, and their indices in the source: whole batches in turn, since a network
    may round differently in a batch of another size."""
    if not distributed.active():
        return source, torch.arange(len(source))
    batches = torch.arange(len(source)).split(BATCH)[distributed.rank() :: distributed.world_size()]
    mine = torch.cat([torch.empty(0, dtype=torch.int64), *batches])
    return source.subset(mine), mine


def prepared_batches(source: Source, prepare: Prepare, shape: Shape, device: torch.device) -> Iterator[Batch]:
    """Batches in order, `shape` (C, H, W) being that of a prepared image; images that cannot be read are left out. A
    batch is valid until the next one is requested."""
    if not len(source):  # the share of one process of many
        return
    if source.images is None:
        yield from _decoded(source, prepare, shape, device)
        return
    for index in torch.arange(len(source)).split(BATCH):
        places = index.tolist()
        yield Batch(prepare(source.take(index).to(device), places), places)


def _decoded(source: Source, prepare: Prepare, shape: Shape, device: torch.device) -> Iterator[Batch]:
    channels, height, width = shape
    batch, workers, processes = _means(len(source))
    chunk = min(CHUNK, -(-batch // workers))
    slots = 1 + -(-AHEAD * workers // -(-batch // chunk))  # one in use, the others written ahead
    copied: list[torch.cuda.Event | None] = [None] * slots
    with shared_ring(slots, batch * channels * height * width * FLOAT, device) as memory:
        # Channels last, which convolutions are fastest with: workers reorder the pixels.
        ring = memory.view(torch.float32).view(slots, batch, height, width, channels).permute(0, 1, 4, 2, 3)
        work = _Decoding(source, prepare, ring)
        pieces = _pieces(len(source), batch, chunk, copied)
        gentle = device.type == "cpu"  # where the network needs the same cores
        rows: list[int] = []
        places: list[int] = []
        for piece, good in ahead(work, pieces, workers, processes, "the number of CPU cores (taskset)", gentle):
            rows += [piece.begin + number for number in good]
            places += [piece.places[number] for number in good]
            end = piece.begin + len(piece.places)
            if end < batch and piece.places.stop < len(source):
                continue
            if rows:
                on_gpu = device.type == "cuda"
                images = ring[piece.slot, :end].to(device, non_blocking=on_gpu)
                if on_gpu:
                    copied[piece.slot] = event = torch.cuda.Event()
                    event.record()
                yield Batch(images if len(rows) == end else images[torch.tensor(rows, device=device)], places)
            rows, places = [], []


def _means(images: int) -> tuple[int, int, bool]:
    """Batch size, number of workers, and whether they are processes."""
    few = images <= FEW
    workers = min(chosen_workers(None), FEW_THREADS) if few else chosen_workers(None)
    processes = CAN_FORK and not few and not current_process().daemon  # daemons may start none
    return min(BATCH, images), workers, processes


def _pieces(images: int, batch: int, chunk: int, copied: list[torch.cuda.Event | None]) -> Iterator[_Piece]:
    """Cut batches into pieces on request. A slot is reused once its batch has been copied to the device."""
    for number, first in enumerate(range(0, images, batch)):
        slot = number % len(copied)
        if (event := copied[slot]) is not None:
            event.synchronize()
        end = min(first + batch, images)
        for begin in range(first, end, chunk):
            yield _Piece(range(begin, min(begin + chunk, end)), slot, begin - first)


class _Decoding:
    """The work of a worker: decode images, prepare them, and write them into the ring."""

    def __init__(self, source: Source, prepare: Prepare, ring: Tensor) -> None:
        self.source, self.prepare, self.ring = source, prepare, ring

    def __call__(self, piece: _Piece) -> tuple[_Piece, list[int]]:
        """The piece, and the numbers of its images that could be read."""
        good: list[int] = []
        waiting: dict[int, Tensor] = {}
        if self.source.expect is not None:
            self.source.expect(piece.places)
        for number, place in enumerate(piece.places):
            try:
                waiting[number] = self.source.fetch(place)
            except BadImage:
                continue
            good.append(number)
            if sum(image.nbytes for image in waiting.values()) > TOGETHER:
                self._write(piece, waiting)
        self._write(piece, waiting)
        return piece, good

    def _write(self, piece: _Piece, waiting: dict[int, Tensor]) -> None:
        """Prepare some images, several at once if they are small, which takes half the time, and forget them."""
        if waiting:
            prepared = self.prepare([*waiting.values()], [piece.places[number] for number in waiting])
            for number, image in zip(waiting, prepared, strict=True):
                self.ring[piece.slot, piece.begin + number] = image
            waiting.clear()
