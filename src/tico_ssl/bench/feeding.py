"""A user's own images: how fast they are decoded and cropped, whether that or the step bounds training, what helps."""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from tico_ssl.bench.stages import ENDLESS, Subject, in_full_flow
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.sections import DataConfig
from tico_ssl.config.views import shorter_side
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.data.store import Store
from tico_ssl.data.stored import store_for
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.workers import ahead
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator

SAMPLED = 512  # images, at least a batch and at most all


@dataclass(frozen=True)
class Feeding:
    """Images per second. By one process: files decoded, and cropped from decoded pixels; by all workers: decoded, and
    cropped from pixels that a store keeps in memory. None where nothing is decoded or kept."""

    sampled: int
    workers: int
    decoded: float | None
    cropped: float | None
    decoded_by_all: float | None
    from_memory: float | None
    loaded: float
    """By the loader, as in the first epoch."""
    step: float
    """By a step on images that are on the device already."""
    stored: bool
    """Whether training keeps decoded images, so that later epochs decode nothing."""

    @property
    def bound(self) -> str:
        """What bounds training, in a sentence."""
        if self.loaded >= self.step:
            return f"the step bounds: {self.step:,.0f} images/s; images would come at {self.loaded:,.0f}"
        return f"{self._slowest} bounds: {self.loaded:,.0f} of {self.step:,.0f} images/s{self._later}"

    @property
    def _slowest(self) -> str:
        if self.decoded is None or self.cropped is None:
            return "loading"
        return "decoding" if self.decoded <= self.cropped else "cropping"

    @property
    def _later(self) -> str:
        if not self.stored or self.from_memory is None:
            return ""
        at = f" at {self.from_memory:,.0f}" if self.from_memory < self.step else ""
        return f"; from the second epoch on images come from the store{at}"

    def advice(self, data: DataConfig, all_workers: int) -> list[str]:
        """What would help where loading bounds: settings and commands."""
        if self.loaded >= self.step:
            return []
        helps = []
        if self.workers < all_workers:
            helps.append(f"training.workers={all_workers}: one per core, instead of {self.workers}")
        if self.decoded is None:
            return helps
        if not data.reduced_decoding:
            helps.append("data.reduced_decoding=true: large JPEGs are decoded at a fraction of their size")
        if not self.stored and data.store == "none":
            helps.append("data.store=auto: decoded images are kept on disk or in memory, if they fit")
        if not self.stored and isinstance(data.source, str):
            helps.append(f"tico data pack {data.source} images.tico: decoded once for all runs, at the size needed")
        return helps


def time_feeding(subject: Subject, seconds: float, step_seconds: float, loader_seconds: float) -> Feeding:
    """Time the images of a subject, given the seconds per step on one batch and per batch of the loader."""
    batch, workers = subject.batch, subject.workers
    loaded, step = batch / loader_seconds, batch / step_seconds
    if subject.source.images is not None:
        return Feeding(0, workers, None, None, None, None, loaded, step, False)
    recipe, sample = subject.recipe, subject.source.limited(max(batch, SAMPLED))
    channels, shorter = recipe.backbone.channels, shorter_side(recipe.views, recipe.data.image_size)
    in_memory = recipe.data.model_copy(update={"store": "memory"})
    store = store_for(sample, in_memory, channels, shorter)
    by_all = _rate_of_all(_decoding(sample) if store is None else store.ensure, len(sample), workers)
    stored = store_for(subject.source, recipe.data, channels, shorter) is not None
    return Feeding(
        sampled=len(sample),
        workers=workers,
        decoded=_decoded_rate(sample, seconds),
        cropped=_cropped_rate(subject, sample, seconds),
        decoded_by_all=by_all,
        from_memory=None if store is None else _rate_from_memory(subject, store, seconds),
        loaded=loaded,
        step=step,
        stored=stored,
    )


def _decoding(source: Source) -> Callable[[int], None]:
    def work(place: int) -> None:
        with suppress(BadImage):
            source.fetch(place)

    return work


def _rate_of_all(work: Callable[[int], None], images: int, workers: int) -> float:
    """Images per second after the first, which waits for the processes to start."""
    begun = 0.0
    for number, _ in enumerate(ahead(work, range(images), workers)):
        begun = time.perf_counter() if number == 0 else begun
    return max(1, images - 1) / (time.perf_counter() - begun)


def _decoded_rate(source: Source, seconds: float) -> float:
    """Images per second in this process."""
    work, begun, number = _decoding(source), time.perf_counter(), 0
    while number < len(source) and (number < 3 or time.perf_counter() - begun < seconds):
        work(number)
        number += 1
    return number / (time.perf_counter() - begun)


def _cropped_rate(subject: Subject, source: Source, seconds: float) -> float:
    """Images per second whose views are cut from decoded pixels, in this process."""
    images = []
    for place in range(min(len(source), 32)):
        with suppress(BadImage):
            images.append(source.fetch(place))
    if not images:
        raise UserError(f"{source.name}: none of the first images can be read")
    views = subject.views
    uniforms = views.draw(len(images), generator(0, "views", 0))[..., : views.place.width]

    def crop_all() -> None:
        for image, numbers in zip(images, uniforms, strict=True):
            views.crop_bytes(image, numbers)

    return len(images) / statistics.median(time_calls(crop_all, seconds, torch.device("cpu")))


def _rate_from_memory(subject: Subject, store: Store, seconds: float) -> float:
    """Images per second of the loader when all of a sample are decoded: as from the second epoch on."""
    training, data = subject.recipe.training, subject.recipe.data
    loader = Loader(
        store.stored(),
        subject.views,
        subject.batch,
        training.seed,
        subject.device,
        subject.workers,
        resident=data.on_gpu,
        store=store,
    )
    flow = in_full_flow(subject)
    flow["warm_up"] = max(flow["warm_up"], loader.steps_per_epoch + 1)  # then they may be on the GPU
    batches = loader.iterate(0, ENDLESS)
    laps = time_calls(lambda: next(batches), seconds, subject.device, **flow)
    return subject.batch / statistics.fmean(laps)
