"""Time of the stages of a training step, and of whole steps in each execution."""

import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tico_ssl.bench.timing import time_calls, time_in_turn
from tico_ssl.config.recipe import Recipe
from tico_ssl.config.sections import Execution
from tico_ssl.config.views import shorter_side
from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.source import Source
from tico_ssl.methods._base import Batch, StepOutput
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.pipeline.gpu_decoding import gpu_decoder
from tico_ssl.pipeline.loader import Loader, RawBatch
from tico_ssl.pipeline.streaming import CHUNK
from tico_ssl.pipeline.workers import AHEAD, default_workers
from tico_ssl.runtime.device import autocast
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import Step, as_input
from tico_ssl.views.executor import Views

LR, PROGRESS = 1e-4, 0.5  # do not change the cost of a step; a small learning rate keeps values finite
ENDLESS = 10**9  # steps


@dataclass(frozen=True)
class Subject:
    """A recipe under measurement on a device, with images for it."""

    recipe: Recipe
    device: torch.device
    precision: torch.dtype
    source: Source
    views: Views
    loader: Loader
    raw: RawBatch
    workers: int

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, precision: torch.dtype, source: Source) -> "Subject":
        """Views, a loader and a first batch from a source."""
        data, settings = recipe.data, recipe.training
        views = Views(recipe.views, data.image_size, data.mean, data.std, precision)
        workers = settings.workers or default_workers()
        bad, decoder = BadFiles(), None
        if data.decoder == "gpu" and source.images is None:
            shorter = shorter_side(recipe.views, data.image_size)
            decoder = gpu_decoder(source, data, recipe.backbone.channels, shorter, device, workers, bad)
        batch, seed = settings.batch_size, settings.seed
        loader = Loader(source, views, batch, seed, device, workers, bad, data.on_gpu, decoder=decoder)
        return cls(recipe, device, precision, source, views, loader, next(loader.iterate(0, 1)), workers)

    @property
    def batch(self) -> int:
        """Images per step."""
        return self.recipe.training.batch_size

    def raw_batches(self) -> Iterator[RawBatch]:
        """The loader's batches, endlessly."""
        return self.loader.iterate(0, ENDLESS)

    def by(self, execution: Execution) -> Recipe:
        """The recipe with another execution, for which networks may be built differently."""
        training = self.recipe.training.model_copy(update={"execution": execution})
        return self.recipe.model_copy(update={"training": training})


class ReadyViews(Views):
    """Passes precomputed views through."""

    def make(self, pixels: Any, decisions: Tensor) -> tuple[Tensor, ...]:
        """The precomputed views."""
        return tuple(pixels)


class StagedStep:
    """An eager training step that can be timed stage by stage."""

    made: tuple[Tensor, ...]
    output: StepOutput

    def __init__(self, subject: Subject) -> None:
        self.subject, self.raw = subject, subject.raw
        self.method = build_method(subject.by("eager"), subject.device, subject.precision)
        self.optimizer = build_optimizer(self.method, subject.recipe.optimizer)
        self.progress: float | Tensor = PROGRESS
        if subject.device.type == "cuda":  # as in Step
            self.progress = torch.tensor(PROGRESS, device=subject.device)
            torch.backends.cudnn.benchmark = True

    def views(self) -> None:
        """Views of the images."""
        self.made = self.subject.views.make(self.raw.pixels, self.raw.decisions)

    def forward(self) -> None:
        """All networks and the loss."""
        views = tuple(as_input(view) for view in self.made)
        with autocast(self.subject.device, self.subject.precision):
            self.output = self.method(Batch(views, self.raw.index, self.raw.label))

    def backward(self) -> None:
        """Gradients, clipped if the recipe says so."""
        self.optimizer.zero_grad(set_to_none=True)
        self.output.loss.backward()
        largest = self.subject.recipe.training.clip_gradient
        if largest is not None:
            nn.utils.clip_grad_norm_(self.method.parameters(), largest)

    def optimiser(self) -> None:
        """The optimiser step."""
        self.optimizer.step()

    def target(self) -> None:
        """The update after the optimiser: the target network."""
        self.method.after_step(self.progress)


def time_stages(subject: Subject, seconds: float) -> dict[str, float]:
    """Median seconds of each stage of an eager step."""
    step = StagedStep(subject)
    works = [step.views, step.forward, step.backward, step.optimiser, step.target]
    times = time_in_turn({work.__name__: work for work in works}, seconds, subject.device)
    return {name: statistics.median(laps) for name, laps in times.items()}


@dataclass(frozen=True)
class Speed:
    """Seconds per step: on precomputed views, with views, and with the loader of training. And the peak GPU memory,
    including images stored there. `execution` is the actual one."""

    execution: str
    network_seconds: float
    step_seconds: float
    training_seconds: float
    peak_bytes: int | None = None


def time_execution(subject: Subject, execution: Execution, seconds: float) -> Speed:
    """Time whole training steps."""
    gc.collect()
    torch.cuda.empty_cache()  # a CUDA graph has its own memory pool and cannot use cached blocks
    on_gpu = subject.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    recipe, device, raw = subject.by(execution), subject.device, subject.raw
    method = build_method(recipe, device, subject.precision)
    optimizer = build_optimizer(method, recipe.optimizer)
    clip, data = recipe.training.clip_gradient, recipe.data
    ready = replace(raw, pixels=subject.views.make(raw.pixels, raw.decisions))

    def step_with(views: Views) -> Step:
        return Step(method, optimizer, views, subject.precision, device, clip, execution)

    step = step_with(ReadyViews(recipe.views, data.image_size, data.mean, data.std))
    network = time_calls(lambda: step(ready, LR, PROGRESS), seconds, device)
    del step  # with its graph: two may not fit when a batch is large
    gc.collect()
    torch.cuda.empty_cache()
    step = step_with(subject.views)
    whole = time_calls(lambda: step(raw, LR, PROGRESS), seconds, device)
    batches = subject.raw_batches()
    training = time_calls(lambda: step(next(batches), LR, PROGRESS), seconds, device, **in_full_flow(subject))
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    made = step.execution if step.execution == execution else f"{step.execution} instead of {execution}"
    return Speed(made, statistics.median(network), statistics.median(whole), statistics.fmean(training), peak)


def time_loader(subject: Subject, seconds: float) -> float:
    """Mean seconds per batch of the loader."""
    batches = subject.raw_batches()
    return statistics.fmean(time_calls(lambda: next(batches), seconds, subject.device, **in_full_flow(subject)))


def in_full_flow(subject: Subject) -> dict[str, int]:
    """Worker processes start empty and deliver in bursts: batches to skip, and to average over."""
    if subject.source.images is not None:
        return {}
    ahead = 2 + AHEAD * subject.workers * CHUNK // subject.batch
    return {"warm_up": ahead, "at_least": ahead}
