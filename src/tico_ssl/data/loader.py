"""Batches in a true random order: every image once per epoch, as a function of (seed, step) alone.

So a loader has no position to save: it starts at any step. Several processes share a global batch, each its slice.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tico_ssl import distributed
from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.source import Source
from tico_ssl.errors import UserError
from tico_ssl.randomness import generator

Images = Tensor | Sequence[Tensor]
RESIDENT_SHARE = 0.4  # of the device's free memory that the images may take


class Loader:
    """The training images of this process, step by step."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        device: torch.device,
        workers: int = 4,
        bad: BadFiles | None = None,
    ) -> None:
        world = distributed.world_size()
        if batch_size % world:
            raise UserError(f"training.batch_size {batch_size} is not a multiple of the {world} processes")
        if batch_size > len(source):
            raise UserError(
                f"training.batch_size {batch_size} is larger than the {len(source)} images of {source.name}"
            )
        self.source, self.batch_size, self.seed, self.device, self.workers = source, batch_size, seed, device, workers
        self.bad = bad if bad is not None else BadFiles()
        self.steps_per_epoch = len(source) // batch_size
        self.images = source.images
        self.storage = "memory-mapped" if source.mapped else "in memory"
        if self.images is None:
            self.storage = f"decoded by {workers} threads"
        self._waited = 0.0
        if self.images is not None and device.type == "cuda" and _fits(self.images, device):
            self.images, self.storage = self.images.to(device), "on the GPU"

    def iterate(self, start: int, stop: int) -> Iterator[tuple[Images, Tensor]]:
        """Images and their indices, from one step to another; files are decoded one batch ahead."""
        batches = self._batches(start, stop)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def take_waited(self) -> float:
        """Seconds that training has waited for images since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _batches(self, start: int, stop: int) -> Iterator[tuple[Images, Tensor]]:
        if self.images is not None:
            for step in range(start, stop):
                index = self.indices(step)
                yield self.images[index.to(self.images.device)].to(self.device, non_blocking=True), index
            return
        with ThreadPoolExecutor(self.workers) as pool:
            pending = self._fetch(pool, start) if start < stop else []
            for step in range(start, stop):
                images = [future.result() for future in pending]
                pending = self._fetch(pool, step + 1) if step + 1 < stop else []
                yield images, self.indices(step)

    def indices(self, step: int) -> Tensor:
        """The places of this process's images in the source."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        local = self.batch_size // distributed.world_size()
        begin = position * self.batch_size + distributed.rank() * local
        return order[begin : begin + local]

    def _order(self, epoch: int) -> Tensor:
        if getattr(self, "_cached", (None, None))[0] != epoch:
            self._cached = (epoch, torch.randperm(len(self.source), generator=generator(self.seed, "order", epoch)))
        return self._cached[1]

    def _fetch(self, pool: ThreadPoolExecutor, step: int) -> list[Future[Tensor]]:
        return [pool.submit(readable, self.source, place, self.bad) for place in self.indices(step).tolist()]


def _fits(images: Tensor, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return images.numel() < RESIDENT_SHARE * free
