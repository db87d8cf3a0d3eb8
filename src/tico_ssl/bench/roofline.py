"""The roofline: training throughput if every operation ran at a measured ceiling of the device.

An operation takes at least the time of its arithmetic and at least the time of its memory traffic; the roofline sums
the longer of the two. Convolutions, linear layers, BatchNorm (with the ReLU behind it) and max-pooling are counted, as
they are called in one forward pass of the method itself: networks and gradients need no description here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tico_ssl.bench.ceilings import Ceilings
from tico_ssl.config.recipe import Recipe
from tico_ssl.methods._base import Batch
from tico_ssl.runtime.randomness import generator
from tico_ssl.training.setup import build_method
from tico_ssl.views.executor import Views

COUNTED = (nn.Conv2d, nn.Linear, _BatchNorm, nn.MaxPool2d)
NORM_FORWARD = 3  # passes over the activation: read for the statistics, read and write to normalise
NORM_BACKWARD = 5  # read gradient and activation for two sums, read both again, write the gradient
IMAGES = 2  # in the traced forward pass: the fewest that BatchNorm takes


@dataclass(frozen=True)
class Operation:
    """Work per image: arithmetic, and values moved between the device and its memory."""

    layer: str
    phase: str
    flops: float
    values: float


@dataclass(frozen=True)
class Roofline:
    """Cost of a training step per image, and the throughput at the ceilings."""

    gflop: float
    forward_gflop: float
    megabytes: float
    images_per_second: float
    limited_by_memory: float
    """Share of the time in memory-bound operations."""


def roofline(operations: Sequence[Operation], ceilings: Ceilings, width: int) -> Roofline:
    """Sum over operations on values of `width` bytes."""
    total = waiting = 0.0
    for operation in operations:
        arithmetic = operation.flops / ceilings.flops_per_second
        traffic = operation.values * width / ceilings.bytes_per_second
        total += max(arithmetic, traffic)
        waiting += traffic if traffic > arithmetic else 0.0
    return Roofline(
        gflop=sum(operation.flops for operation in operations) / 1e9,
        forward_gflop=sum(operation.flops for operation in operations if operation.phase == "forward") / 1e9,
        megabytes=sum(operation.values for operation in operations) * width / 1e6,
        images_per_second=1 / total,
        limited_by_memory=waiting / total,
    )


def step_operations(recipe: Recipe) -> list[Operation]:
    """All operations of a recipe's training step, found by one forward pass on the CPU."""
    device, data = torch.device("cpu"), recipe.data
    if "bn_splits" in type(recipe.method).model_fields:  # groups of a batch have the operations of the batch
        recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update={"bn_splits": 1})})
    method = build_method(recipe, device, torch.float32)
    views = Views(recipe.views, data.image_size, data.mean, data.std)
    pixels = torch.zeros(IMAGES, recipe.backbone.channels, data.image_size, data.image_size, dtype=torch.uint8)
    made = views(pixels, views.draw(IMAGES, generator(0, "views", 0)))
    return operations_of(method, Batch(made, torch.arange(IMAGES)), IMAGES, recipe.training.batch_size)


def operations_of(network: nn.Module, argument: Any, images: int, batch: int) -> list[Operation]:
    """Operations of a forward pass of `images` images, and of its backward pass, per image of a batch."""
    found: list[Operation] = []
    names: dict[nn.Module, str] = {
        module: name for name, module in network.named_modules() if isinstance(module, COUNTED)
    }

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.extend(_operations(names[module], module, inputs[0], output, images, batch))

    hooks = [module.register_forward_hook(count) for module in names]
    try:
        network(argument)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _operations(
    name: str, module: nn.Module, given: Tensor, output: Tensor, images: int, batch: int
) -> list[Operation]:
    """The forward operation of a layer and, if it needs a gradient, the backward ones."""
    into, out = given.numel() / images, output.numel() / images
    if isinstance(module, nn.Conv2d | nn.Linear):
        flops = 2 * out * module.weight[0].numel()  # a multiply-add per weight and output
        # Each of the three reads two of input, output and weights (or their gradients) and writes the third.
        values = into + out + module.weight.numel() / batch
        gradients = torch.is_grad_enabled() * (int(given.requires_grad) + int(module.weight.requires_grad))
        return [Operation(name, phase, flops, values) for phase in ["forward"] + ["backward"] * gradients]
    forward, backward = (NORM_FORWARD * out, NORM_BACKWARD * out)
    if isinstance(module, nn.MaxPool2d):
        forward = backward = into + out
    phases = [("forward", forward)] + [("backward", backward)] * output.requires_grad
    return [Operation(name, phase, 0.0, values) for phase, values in phases]
