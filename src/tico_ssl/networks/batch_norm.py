"""BatchNorm: statistics of the global batch over processes, and calibration of running statistics.

torch's SyncBatchNorm supports GPUs only. On CPUs the same is done with one gather in the forward pass and one sum in
the backward pass, which tests compare with one process that has the whole batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError

M = TypeVar("M", bound=nn.Module)


class SharedBatchNorm(_BatchNorm):
    """BatchNorm over all processes, each holding an equal share of the batch, on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"BatchNorm expects (batch, channels, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not distributed.active():
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        world = distributed.world_size()
        given, input = input.dtype, input.to(torch.promote_types(input.dtype, torch.float32))  # as torch's BatchNorm
        mean, variance = _joint_moments(input.detach(), axes)
        self._track(mean, variance, world * input.numel() // input.shape[1])
        output: Tensor = _Normalised.apply(input, mean.view(shape), (variance.view(shape) + self.eps).rsqrt(), axes)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(given)

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * count / max(1, count - 1), momentum)


class SharedBatchNormAct(SharedBatchNorm):
    """timm's BatchNorm that dropout and activation belong to, over all processes."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def _joint_moments(input: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance over all processes, from those of each."""
    variance, mean = torch.var_mean(input, axes, correction=0)
    means, variances = distributed.stacked(torch.stack([mean, variance]), distributed.STATISTICS).unbind(1)
    joint = means.mean(0)
    return joint, variances.mean(0) + (means - joint).square().mean(0)


class _Normalised(torch.autograd.Function):
    """(x - mean) / deviation, of which both depend on x in all processes: dx = (z - mean(z) - y mean(z y)) / deviation,
    the means over all of them."""

    @staticmethod
    def forward(context: Any, input: Tensor, mean: Tensor, inverse: Tensor, axes: list[int]) -> Tensor:
        output = (input - mean) * inverse
        context.save_for_backward(output, inverse)
        context.axes = axes
        return output

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, inverse = context.saved_tensors
        z, axes = gradients[0], context.axes
        means = torch.stack([z.mean(axes, keepdim=True), (z * output).mean(axes, keepdim=True)])
        mean_z, mean_product = distributed.add_up(means, distributed.STATISTICS) / distributed.world_size()
        return (z - mean_z - output * mean_product) * inverse, None, None, None


def share_statistics(model: M) -> M:
    """Make every BatchNorm of the model use the statistics of the global batch over processes."""
    if not distributed.active():
        return model
    kinds: set[type[nn.Module]] = {type(module) for module in model.modules() if isinstance(module, _BatchNorm)}
    shared = {kind: _shared_form(kind) for kind in kinds - {nn.SyncBatchNorm}}
    if next(model.parameters()).is_cuda:
        _convert_on_gpu(model, SharedBatchNormAct in shared.values())
        return model
    for module in model.modules():
        if type(module) in shared:
            module.__class__ = shared[type(module)]
    return model


def _shared_form(kind: type[nn.Module]) -> type[SharedBatchNorm]:
    """What replaces a kind of BatchNorm. A kind with a forward pass of its own would lose it."""
    if issubclass(kind, SharedBatchNorm):
        return kind
    if kind.__name__ == "BatchNormAct2d":  # of timm, which is not imported for it
        return SharedBatchNormAct
    if kind.forward is not nn.BatchNorm2d.forward:
        raise UserError(f"several processes cannot share the statistics of {kind.__name__}: use another backbone")
    return SharedBatchNorm


def _convert_on_gpu(model: nn.Module, has_activations: bool) -> None:
    """torch's conversion, in place; or timm's, which keeps the activations of its own BatchNorm."""
    if not has_activations:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    from timm.layers.norm_act import convert_sync_batchnorm  # loaded already, with the network

    convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]


@contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """Within, BatchNorm in training mode does not update its running statistics: for a repeated forward pass."""
    norms = _in_training(model)
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    before = [count.clone() for count in counts]
    try:
        with _momenta(norms, lambda momentum: 0.0):
            yield
    finally:
        for count, old in zip(counts, before):
            count.copy_(old)


@contextmanager
def divided_statistics(model: nn.Module, passes: int) -> Iterator[None]:
    """Within, so many forward passes together move running statistics as far as one does otherwise: for a batch that is
    normalised in groups."""
    with _momenta(_in_training(model), lambda momentum: momentum and 1 - (1 - momentum) ** (1 / passes)):
        yield


def _in_training(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def _momenta(norms: list[_BatchNorm], changed: Callable[[float | None], float | None]) -> Iterator[None]:
    """Within, BatchNorm has another momentum; None is a cumulative average."""
    before = [norm.momentum for norm in norms]
    for norm, momentum in zip(norms, before):
        norm.momentum = changed(momentum)
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before):
            norm.momentum = momentum


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Set running statistics to plain averages over the batches, and leave the model in evaluation mode.

    An untrained network whose BatchNorm still has mean 0 and variance 1 would be an unfairly weak baseline.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    model.train()
    for number, batch in enumerate(batches):
        if len(batch) > 1 or number == 0:  # a single remaining image has no variance
            model(batch)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    return model.eval()
