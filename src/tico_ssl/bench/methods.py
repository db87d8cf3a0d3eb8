"""Cost of all methods under equal conditions: the same network, images, batch size and optimiser.

Every method has the recipe's projector sizes `hidden` and `dim`, and its own defaults otherwise. There is one row per
layout of views among the method's recipes: two views, two plus local crops, an image and a jigsaw. Views follow the
recipe if it begins with such views, else the method's own recipe.
"""

import functools
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tico_ssl.bench.stages import LR, PROGRESS, Subject
from tico_ssl.bench.timing import time_calls
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import Recipe, load_recipe, packaged_recipes
from tico_ssl.config.views import ViewPolicy
from tico_ssl.data.source import Source
from tico_ssl.networks.backbones import Backbone
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import Outcome, Step

REFERENCE = "tico"  # the method that the others are compared with

Layout = tuple[tuple[int | None, float | None, int], ...]


@dataclass(frozen=True)
class MethodCost:
    """Cost of a step of one method. Backbone passes are per image, with and without gradient."""

    method: str
    views: str
    execution: str
    step_seconds: float
    images_per_second: float
    relative_seconds: float
    forwards: float
    backwards: float
    forward_pixels: float
    """Pixels of all forward passes per image, as a multiple of one view at the recipe's image size."""
    state_bytes: int
    """State besides the trained weights: target, queue, bank, running statistics."""
    peak_bytes: int | None
    """Device memory, without what was allocated before; None on a CPU."""
    relative_peak: float | None
    loss: float


def time_methods(subject: Subject, seconds: float) -> tuple[list[MethodCost], dict[str, str]]:
    """The cost of every method, and why some could not be measured."""
    costs: list[MethodCost] = []
    left_out: dict[str, str] = {}
    names = catalogue.entries("methods")
    for name in (REFERENCE, *(other for other in names if other != REFERENCE)):
        for views in _arrangements(name, subject.recipe.views):
            try:
                recipe = _with_method(subject.recipe, name, views, subject.source)
                costs.append(_time_method(_subject_of(subject, recipe), seconds, costs[0] if costs else None))
            except torch.OutOfMemoryError:
                left_out[f"{name}, {_described(views)}"] = "does not fit in GPU memory"
            except UserError as error:
                left_out[f"{name}, {_described(views)}"] = str(error)
    return costs, left_out


def _arrangements(name: str, given: list[ViewPolicy]) -> list[list[ViewPolicy]]:
    """One list of views per arrangement ("2 + 6 views") among the method's recipes, the smallest first. Where recipes
    differ in the size of small crops, those for ImageNet count."""
    found: dict[str, list[ViewPolicy]] = {}
    for views in (recipe.views for recipe in _packaged() if recipe.method.name == name):
        layout, singly = _layout(views), _singly(given)[: len(_layout(views))]
        found[_described(views)] = singly if _layout(singly) == layout else views  # ImageNet's are the last
    return sorted(found.values(), key=lambda views: len(_layout(views)))


@functools.cache
def _packaged() -> list[Recipe]:
    return [load_recipe(name) for name in packaged_recipes()]


def _singly(policies: list[ViewPolicy]) -> list[ViewPolicy]:
    return [policy.model_copy(update={"count": 1}) for policy in policies for _ in range(policy.count)]


def _layout(policies: list[ViewPolicy]) -> Layout:
    """Size and pieces of every view."""
    return tuple((policy.size, policy.relative_size, policy.jigsaw) for policy in _singly(policies))


def _with_method(recipe: Recipe, name: str, views: list[ViewPolicy], source: Source) -> Recipe:
    """The recipe with another method, its projector sizes kept, and views for that method."""
    method = recipe.method
    if method.name != name:
        kind = catalogue.declaration("methods", name, "Config")
        sizes = {key: value for key, value in method if key in ("hidden", "dim")} | {"images": len(source)}
        method = kind(**{key: value for key, value in sizes.items() if key in kind.model_fields})
    return recipe.model_copy(update={"method": method, "views": views})


def _described(policies: list[ViewPolicy]) -> str:
    """'2 views', '2 + 6 views' where six are smaller, 'view + jigsaw'."""
    jigsaws = sum(policy.count for policy in policies if policy.jigsaw)
    small = sum(policy.count for policy in policies if not policy.jigsaw and (policy.relative_size or 1) < 1)
    whole = sum(policy.count for policy in policies) - jigsaws - small
    if jigsaws:
        return "view + jigsaw" if (whole, small, jigsaws) == (1, 0, 1) else f"{whole + small} views + {jigsaws} jigsaws"
    return f"{whole} + {small} views" if small else f"{whole} view{'s' * (whole != 1)}"


def _subject_of(subject: Subject, recipe: Recipe) -> Subject:
    """The same images for another recipe, with labels (all 0) for a method that needs them."""
    subject = Subject.of(recipe, subject.device, subject.precision, subject.source)
    label = subject.raw.label
    if label is None:
        label = torch.zeros_like(subject.raw.index)
    return replace(subject, raw=replace(subject.raw, label=label))


def _time_method(subject: Subject, seconds: float, reference: MethodCost | None) -> MethodCost:
    """Whole training steps, views included, on a batch that is on the device."""
    device, batch, recipe = subject.device, subject.batch, subject.by("auto")
    before = _forget_peak(device)
    method = build_method(recipe, device, subject.precision)
    labels = subject.source.labels
    method.check_data(len(subject.source), torch.zeros(1, dtype=torch.int64) if labels is None else labels)
    optimizer = build_optimizer(method, recipe.optimizer)
    clip = recipe.training.clip_gradient
    step = Step(method, optimizer, subject.views, subject.precision, device, clip, "auto")
    last: list[Outcome] = []

    def work(raw: RawBatch = subject.raw) -> None:
        last[:] = [step(raw, LR, PROGRESS)]

    with counted_passes(method) as passes:
        work()  # the first steps are eager in every execution, so hooks run
    laps = statistics.median(time_calls(work, seconds, device))
    peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
    reference_peak = peak if reference is None else reference.peak_bytes
    return MethodCost(
        method=recipe.method.name,
        views=_described(recipe.views),
        execution=step.execution,
        step_seconds=laps,
        images_per_second=batch / laps,
        relative_seconds=1.0 if reference is None else laps / reference.step_seconds,
        forwards=passes.forwards / batch,
        backwards=passes.backwards / batch,
        forward_pixels=passes.pixels / batch / recipe.data.image_size**2,
        state_bytes=extra_state_bytes(method),
        peak_bytes=peak,
        relative_peak=peak / reference_peak if peak and reference_peak else None,
        loss=_finite_loss(last[0]),
    )


def _forget_peak(device: torch.device) -> int | None:
    """Allocated bytes on a GPU, with the peak counter reset."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _finite_loss(outcome: Outcome) -> float:
    loss = float(outcome.output.loss.detach())
    if not math.isfinite(loss):
        raise UserError(f"the loss became {loss}")
    return loss


@dataclass
class Passes:
    """Images that went through backbones, those with a backward pass, and pixels of the former."""

    forwards: int = 0
    backwards: int = 0
    pixels: int = 0


@contextmanager
def counted_passes(method: nn.Module) -> Iterator[Passes]:
    """Count the passes through the method's backbone and its target copies."""
    passes = Passes()

    def forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        images = inputs[0]
        passes.forwards += len(images)
        passes.pixels += len(images) * images.shape[-1] * images.shape[-2]
        if output.requires_grad:
            output.register_hook(lambda gradient: backward(len(gradient)))

    def backward(images: int) -> None:
        passes.backwards += images

    hooks = [module.register_forward_hook(forward) for module in method.modules() if isinstance(module, Backbone)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def extra_state_bytes(method: nn.Module) -> int:
    """Size of all parameters and buffers except trained parameters."""
    trained = {id(parameter) for parameter in method.parameters() if parameter.requires_grad}
    every = {id(tensor): tensor for tensor in (*method.parameters(), *method.buffers())}
    return sum(tensor.numel() * tensor.itemsize for key, tensor in every.items() if key not in trained)
