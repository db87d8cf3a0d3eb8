"""What made the first value of a training step that is not finite, in words.

The step is carried out once more while hooks read the largest value of every module's output, of its BatchNorm
statistics and of all gradients, in the order in which they are computed. Where the first reading that is not finite
stands, forward or backward, in the loss or in the update, tells what to change.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tico_ssl.methods._base import StepOutput
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.training.finite import not_finite, state_of
from tico_ssl.training.step import Step

Stage = Literal["views", "forward pass", "loss", "backward pass", "optimiser", "update after the optimiser"]

LARGE = 1e4  # more than any weight or activation of a network that learns
AROUND = 3  # readings that are shown from before the first bad one

CALM = "lower optimizer.lr (to a tenth, say), lengthen optimizer.warmup_epochs or set training.clip_gradient=1"
CAREFUL = "other settings of the method, or training.precision=fp32 where it is not"


@dataclass(frozen=True)
class Reading:
    """The largest absolute value of a tensor, or NaN; and of the inputs and weights of its module."""

    stage: Stage
    name: str
    largest: float
    inputs: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Explanation:
    """What made a value that is not finite: in a sentence, and in several lines."""

    summary: str
    lines: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """The first reading of a step that is not finite, if there is one, those before it, and the terms of the loss."""

    first: Reading | None
    before: list[Reading]
    terms: dict[str, float]

    def explained(self, step: int, lr: float) -> Explanation:
        """The diagnosis in words. Steps count from 0, in words from 1."""
        losses = ", ".join(f"{name} {value:.4g}" for name, value in self.terms.items())
        first = self.first
        if first is None:
            summary = f"step {step + 1}, carried out once more, is finite from the views to the update"
            return Explanation(summary, [f"{summary} ({losses})"])
        head = f"the first value that is not finite is in the {first.stage} of step {step + 1}"
        cause, remedy = self._cause(first)
        readings = [_words(reading) for reading in (*self.before[-AROUND:], first)]
        lines = [f"{head}:", *(f"  {words}" for words in readings), f"  {losses}; learning rate {lr:.3g}"]
        summary = f"{head} ({first.name}); likely cause: {cause}; try: {remedy}"
        return Explanation(summary, [*lines, f"likely cause: {cause}", f"try: {remedy}"])

    def _cause(self, first: Reading) -> tuple[str, str]:
        """The likely cause, and what to try."""
        if first.stage == "views":
            return "the views are not finite before a network sees them", "look at the images, data.mean and data.std"
        gradient = max((reading.largest for reading in self.before if reading.stage == "backward pass"), default=0.0)
        if first.stage == "optimiser" and gradient < LARGE:
            return f"gradients are small (up to {gradient:.3g}), but the learning rate makes the update overflow", CALM
        if first.stage == "update after the optimiser":
            return "weights and gradients are finite, but target, queue or prototypes are not", CAREFUL
        near = (first, *self.before[-AROUND:])
        sizes = [size for reading in near for size in (reading.largest, reading.inputs, reading.weights)]
        largest = max([gradient, *(size for size in sizes if math.isfinite(size))])
        if largest < LARGE:
            return "values are small before it: a division, root, norm or logarithm at 0, or a setting", CAREFUL
        weights = max(reading.weights for reading in near)
        if weights < LARGE and first.stage in ("loss", "backward pass", "optimiser"):
            return f"weights are small, but the loss and its gradients reach {largest:.3g}", f"{CAREFUL}; or {CALM}"
        return f"values have grown to {largest:.3g}, so the learning rate is too high for this network", CALM


def diagnose(step: Step, raw: RawBatch, lr: float, progress: float) -> Diagnosis:
    """Carry out a step, and find its first value that is not finite."""
    made = step.views.make(raw.pixels, raw.decisions)
    readings = [Reading("views", f"view {number}", _largest(view)) for number, view in enumerate(made)]
    with _hooks(step.method, readings.append):
        output = step(raw, lr, progress).output
    terms = {name: float(value) for name, value in _terms(output).items()}
    stages = [*(reading.stage for reading in readings), "backward pass"]
    computed = stages.index("backward pass")  # parts, or blocks that are recomputed, have forward passes behind it, too
    readings[computed:computed] = [Reading("loss", name, abs(value)) for name, value in terms.items()]
    readings += _updated(step)
    for place, reading in enumerate(readings):
        if not math.isfinite(reading.largest):
            return Diagnosis(reading, readings[:place], terms)
    return Diagnosis(None, readings, terms)


def _terms(output: StepOutput) -> dict[str, Tensor]:
    """The terms of the loss, then the loss."""
    terms = {name: value.detach() for name, value in output.terms.items() if value.numel() == 1}
    return terms | {"loss": output.loss.detach()}


def _updated(step: Step) -> list[Reading]:
    """What is not finite after the step: first what the optimiser changes."""
    state, method = state_of(step.method, step.optimizer), step.method
    others = method.state_dict().keys() - {name for name, weight in method.named_parameters() if weight.requires_grad}
    found = sorted(not_finite(state), key=lambda name: name in others)
    return [
        Reading("update after the optimiser" if name in others else "optimiser", name, _largest(state[name]))
        for name in found
    ]


Read = Callable[[Reading], None]


@contextmanager
def _hooks(method: nn.Module, read: Read) -> Iterator[None]:
    """Within, every module and every gradient is read as it is computed."""
    modules = [(name, module) for name, module in method.named_modules() if name]
    handles = [module.register_forward_hook(partial(_read_module, name, read)) for name, module in modules]
    for name, weight in method.named_parameters():
        if weight.requires_grad:
            handles.append(weight.register_post_accumulate_grad_hook(partial(_read_weight, name, read)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read_module(name: str, read: Read, module: nn.Module, inputs: Any, output: Any) -> None:
    """A module's statistics and output now, the gradient of its output later."""
    weights = max((_largest(weight) for weight in module.parameters(recurse=False)), default=0.0)
    given = max((_largest(value) for value in _tensors(inputs)), default=0.0)
    for kind, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            read(Reading("forward pass", f"{kind} of {name}", _largest(buffer), given, weights))
    for value in _tensors(output):
        read(Reading("forward pass", f"the output of {name}", _largest(value), given, weights))
        if value.requires_grad:
            value.register_hook(partial(_read_gradient, name, read, weights))


def _read_gradient(name: str, read: Read, weights: float, gradient: Tensor) -> None:
    read(Reading("backward pass", f"the gradient at the output of {name}", _largest(gradient), weights=weights))


def _read_weight(name: str, read: Read, weight: Tensor) -> None:
    if weight.grad is not None:
        read(Reading("backward pass", f"the gradient of {name}", _largest(weight.grad), weights=_largest(weight)))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_floating_point()]


@torch.no_grad()
def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _words(reading: Reading) -> str:
    """A reading in words."""
    sizes = {"inputs": reading.inputs, "weights": reading.weights}
    given = ", ".join(f"{name} up to {size:.3g}" for name, size in sizes.items() if size)
    return f"{reading.name}: {reading.largest:.3g}" + (f" ({given})" if given else "")
