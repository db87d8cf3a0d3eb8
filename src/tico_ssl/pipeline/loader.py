"""Shuffled batches: every image once per epoch, in an order that is a function of (seed, step) alone.

So a loader has no state to save and starts at any step. Each process loads its slice of the global batch. Images in
memory, memory-mapped or on the device are loaded whole and cropped on the device; files are decoded by worker
processes, which also cut the crops, so that only the views' pixels are transferred. A store keeps decoded images in
memory or on disk; if they fit on a GPU, they are cropped there once all have been decoded, and small ones before.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source
from tico_ssl.data.store import Store
from tico_ssl.pipeline.gpu_decoding import GpuDecoder
from tico_ssl.pipeline.streaming import CHUNK, Stream, Task
from tico_ssl.pipeline.workers import ahead
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import sent
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted
from tico_ssl.views.executor import Views, crops_ragged, sizes_of

RESIDENT_SHARE = 0.4  # fraction of the device's free memory that the images may take
SMALL = 2  # times the size of its crops: an image that is cropped on the GPU rather than by a worker
FILLED_AHEAD = 64  # pieces of a batch that a worker decodes ahead into the store, also while a first step is compiled
PIECE = 1024  # images moved to the device at a time, so that mapped ones are never in memory all at once


@dataclass(frozen=True)
class RawBatch:
    """A step's images on the device, whole (N, C, H, W) or as crops (N, C, side, side) per view; the decisions of the
    view operations; the images' indices in the source; and their labels, if there are any."""

    pixels: Tensor | tuple[Tensor, ...]
    decisions: Tensor
    index: Tensor
    label: Tensor | None = None


class Loader:
    """The training images of this process, step by step."""

    def __init__(
        self,
        source: Source,
        views: Views,
        batch_size: int,
        seed: int,
        device: torch.device,
        workers: int = 1,
        bad: BadFiles | None = None,
        resident: bool = True,
        store: Store | None = None,
        decoder: GpuDecoder | None = None,
    ) -> None:
        world = distributed.world_size()
        if batch_size % world:
            raise UserError(f"training.batch_size {batch_size} is not a multiple of the {counted(world, 'process')}")
        if batch_size > len(source):
            raise UserError(
                f"training.batch_size {batch_size} is larger than the {counted(len(source), 'image')} of {source.name}"
            )
        self.source, self.views, self.batch_size, self.seed, self.device = source, views, batch_size, seed, device
        self.bad = bad if bad is not None else BadFiles()
        self.steps_per_epoch = len(source) // batch_size
        local = batch_size // world
        self._mine = slice(distributed.rank() * local, (distributed.rank() + 1) * local)
        self._resident: Tensor | None = None  # all images, if they fit on the device
        self._ragged: Ragged | None = None  # the same for images of different sizes, once they have been decoded
        self.store = store
        self._store = store if resident and crops_ragged(device) else None  # until images are on the GPU
        self._stream: Stream | None = None
        self._decoder, self._keep = decoder, resident
        self._waited = 0.0
        self.storage = "memory-mapped" if source.mapped else "in memory"
        if decoder is not None:
            self.storage = decoder.name
        elif source.images is None:
            self._stream = Stream(source, views.crop_bytes, views.bytes_per_image, local, workers, device, self.bad)
            self.storage = self._stream.name
            if store is not None:
                self.storage += f", each once: {store.described()}"
        elif resident and device.type == "cuda" and _fits(source, device):
            self._resident, self.storage = _on_device(source, device), "on the GPU"

    def iterate(self, start: int, stop: int) -> Generator[RawBatch]:
        """The batches of steps `start` to `stop`; files are decoded ahead."""
        if self._decoder is not None:
            yield from self._decoded(self._decoder, start, stop)
            return
        if self._stream is None:
            yield from self._taken(start, stop)
            return
        if self._store is not None and self._store.count == len(self.source):
            self._settle()
        while start < stop and self._ragged is None:
            epoch_end = (start // self.steps_per_epoch + 1) * self.steps_per_epoch
            end = stop if self._store is None else min(stop, epoch_end)
            if self._small():
                start = yield from self._filled(start, end)
            yield from self._streamed(start, end)
            start = end
            self._settle()
        yield from self._cut(start, stop)

    def take_waited(self) -> float:
        """Seconds spent waiting for images since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def indices(self, step: int) -> Tensor:
        """Indices in the source of this process's images."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[position * self.batch_size :][self._mine]

    def _taken(self, start: int, stop: int) -> Iterator[RawBatch]:
        for step in range(start, stop):
            index = self.indices(step)
            if self._resident is not None:
                images = self._resident[sent(index, self.device)]
            else:
                with self._waiting():
                    images = sent(self.source.take(index), self.device)
            yield self._raw_batch(images, self.views.decide(self._uniforms(step), sizes_of(images)), index)

    def _cut(self, start: int, stop: int) -> Iterator[RawBatch]:
        """From decoded images on the GPU: the crops that workers would have cut, to the bit."""
        for step in range(start, stop):
            assert self._ragged is not None
            index = self.indices(step)
            yield self._cropped(step, index, self._ragged.take(sent(index, self.device)), self._sizes[index])

    def _decoded(self, decoder: GpuDecoder, start: int, stop: int) -> Iterator[RawBatch]:
        """Decoded by the GPU: all images once, if they fit there, else those of each batch."""
        if self._keep:
            with self._waiting():
                if (all_of_them := decoder.everything(_room(self.device))) is not None:
                    self._ragged, self._sizes = all_of_them
            self._keep = False  # one try
        if self._ragged is not None:
            yield from self._cut(start, stop)
            return
        batches = decoder.batches(self.indices(step).tolist() for step in range(start, stop))
        with closing(batches):
            for step in range(start, stop):
                with self._waiting():
                    images, sizes = next(batches)
                yield self._cropped(step, self.indices(step), images, sizes)

    def _cropped(self, step: int, index: Tensor, images: Ragged, sizes: Tensor) -> RawBatch:
        decisions = sent(self.views.decide(self._uniforms(step), sizes), self.device)
        return self._raw_batch(self.views.crop(images, decisions), decisions, index)

    def _small(self) -> bool:
        """Whether workers need not cut crops, which may take as long as decoding: whole images are not much larger."""
        return self._store is not None and self._store.expected < SMALL * self.views.bytes_per_image * len(self.source)

    def _filled(self, start: int, stop: int) -> Generator[RawBatch, None, int]:
        """From the store, into which workers decode; the crops that they would have cut, to the bit. Ends with the step
        at which the store has no more room."""
        assert self._stream is not None
        assert self._store is not None
        stream, store = self._stream, self._store
        steps = (self.indices(step).split(stream.chunk) for step in range(start, stop))
        pieces = (piece.tolist() for step in steps for piece in step)
        per_step = -(-stream.batch_size // stream.chunk)
        workers, processes = stream.workers, stream.processes
        filling = ahead(store.ensure_all, pieces, workers, processes, "training.workers", prefetched=FILLED_AHEAD)
        with closing(filling):
            for step in range(start, stop):
                with self._waiting():
                    for _ in islice(filling, per_step):
                        pass
                    if store.refused:
                        return step
                    index = self.indices(step)
                    images = store.together(index.tolist(), self.device.type == "cuda") or Ragged.of(
                        [readable(self.source, place, self.bad) for place in index.tolist()]
                    )
                yield self._cropped(step, index, images.to(self.device), images.sizes.float())
        return stop

    def _settle(self) -> None:
        """Once all images have been decoded, but for a few that an epoch leaves out, they move to the GPU, if they
        fit."""
        store, self._store = self._store, None  # one try
        if store is None or self._stream is None:
            return
        with self._waiting():
            missing = store.missing()
            workers = min(self._stream.workers, 1 + len(missing) // CHUNK)
            for _ in ahead(store.ensure, missing, workers, self._stream.processes and workers > 1):
                pass
            if not store.missing() and _has_room(store.bytes, self.device):
                self._ragged = store.ragged(self.device)
                self._sizes = self._ragged.sizes.cpu().to(torch.float32)

    def _streamed(self, start: int, stop: int) -> Iterator[RawBatch]:
        assert self._stream is not None
        tasks = (
            Task(self.indices(step).numpy(), self._uniforms(step)[..., : self.views.place.width].numpy())
            for step in range(start, stop)
        )
        batches = self._stream.batches(tasks)
        for step in range(start, stop):
            with self._waiting():
                crops = next(batches)
            yield self._raw_batch(crops, self.views.decide(self._uniforms(step)), self.indices(step))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._waited += time.perf_counter() - before

    def _raw_batch(self, pixels: Tensor | tuple[Tensor, ...], decisions: Tensor, index: Tensor) -> RawBatch:
        labels = [] if self.source.labels is None else [self.source.labels[index]]
        return RawBatch(pixels, *(sent(x, self.device) for x in (decisions, index, *labels)))

    def _uniforms(self, step: int) -> Tensor:
        return self.views.draw(self.batch_size, generator(self.seed, "views", step))[self._mine]

    def _order(self, epoch: int) -> Tensor:
        if getattr(self, "_cached", (None, None))[0] != epoch:
            self._cached = (epoch, torch.randperm(len(self.source), generator=generator(self.seed, "order", epoch)))
        return self._cached[1]


def _fits(source: Source, device: torch.device) -> bool:
    assert source.images is not None
    return _has_room(len(source) * source.images[0].numel(), device)


def _has_room(size: int, device: torch.device) -> bool:
    return size < _room(device)


def _room(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(RESIDENT_SHARE * free)


def _on_device(source: Source, device: torch.device) -> Tensor:
    assert source.images is not None
    images = torch.empty((len(source), *source.images.shape[1:]), dtype=torch.uint8, device=device)
    for places in torch.arange(len(source)).split(PIECE):
        images[places[0] : places[-1] + 1] = source.take(places).to(device)
    return images
