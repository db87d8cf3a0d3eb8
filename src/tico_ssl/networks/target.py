"""The target network: a twin that follows the online network as a moving average of its parameters.

Its BatchNorm works in training mode with statistics of its own batches, and keeps running buffers of its own;
only parameters are averaged.
"""

import copy

import torch
from torch import Tensor, nn


def target_of(online: nn.Module) -> nn.Module:
    """A copy that takes no gradient."""
    return copy.deepcopy(online).requires_grad_(False)


@torch.no_grad()
def update_target(target: nn.Module, online: nn.Module, decay: float | Tensor) -> None:
    """target <- decay * target + (1 - decay) * online, over all parameters at once."""
    followers: list[Tensor] = list(target.parameters())
    leaders: list[Tensor] = list(online.parameters())
    if isinstance(decay, Tensor):  # a tensor lets a captured step change its decay
        torch._foreach_mul_(followers, decay)
        torch._foreach_add_(followers, list(torch._foreach_mul(leaders, 1 - decay)))
    else:
        torch._foreach_lerp_(followers, leaders, 1 - decay)


@torch.no_grad()
def copy_statistics(target: nn.Module, online: nn.Module) -> None:
    """The running averages of the online network's BatchNorm, for a target that works in evaluation mode."""
    for mine, theirs in zip(target.buffers(), online.buffers(), strict=True):
        mine.copy_(theirs)
