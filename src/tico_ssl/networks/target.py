"""The target network: a twin that follows the online network as a moving average of its parameters.

Its BatchNorm works in training mode with statistics of its own batches, and keeps running buffers of its own;
only parameters are averaged.

Neither network needs anything of the other before the loss. A captured step therefore lends the target a second CUDA
stream: convolutions are limited by arithmetic and what lies between them by memory, and small operations leave most of
a GPU idle, so two networks side by side take less time than one after the other. Only a captured step does so, since
its graph knows what waits for what and Python is not there to fall behind.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

Embeddings = tuple[Tensor, ...]


class Target(nn.Sequential):
    """A copy of the online network that takes no gradient."""

    stream: torch.cuda.Stream | None = None  # a second one, lent by a captured step

    def __init__(self, online: nn.Sequential) -> None:
        super().__init__(*copy.deepcopy(online))
        self.requires_grad_(False)

    @torch.no_grad()
    def follow(self, online: nn.Module, decay: float | Tensor) -> None:
        """target <- decay * target + (1 - decay) * online, over all parameters at once."""
        followers: list[Tensor] = list(self.parameters())
        leaders: list[Tensor] = list(online.parameters())
        if isinstance(decay, Tensor):  # a tensor lets a captured step change its decay
            torch._foreach_mul_(followers, decay)
            torch._foreach_add_(followers, list(torch._foreach_mul(leaders, 1 - decay)))
        else:
            torch._foreach_lerp_(followers, leaders, 1 - decay)

    @torch.no_grad()
    def copy_statistics(self, online: nn.Module) -> None:
        """The running averages of the online network's BatchNorm, for a target that works in evaluation mode."""
        for mine, theirs in zip(self.buffers(), online.buffers(), strict=True):
            mine.copy_(theirs)


def encode_both(
    online: Callable[[Tensor], Tensor], views: Sequence[Tensor], target: Target, target_views: Sequence[Tensor]
) -> tuple[Embeddings, Embeddings]:
    """What the online network makes of its views, and the target, without a gradient, of its own: side by side where
    there is a second stream. Each view in a forward of its own: in one batch they would share BatchNorm statistics.

    The second stream begins after all that was launched before and is waited for at the end, so what either of them
    frees is not reused too early. The caller keeps the views alive until then.
    """
    side = target.stream if target_views else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.no_grad(), nullcontext() if side is None else torch.cuda.stream(side):
            fixed = tuple(target(view) for view in target_views)
        trained = tuple(online(view) for view in views)
    finally:
        if side is not None:  # also where a network fails: a capture must not end with a stream left behind
            torch.cuda.current_stream().wait_stream(side)
    return trained, fixed


@contextmanager
def overlapping(method: nn.Module, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within, the targets among a method's modules have a second stream."""
    targets = [module for module in method.modules() if isinstance(module, Target)]
    for target in targets:
        target.stream = stream
    try:
        yield
    finally:
        for target in targets:
            target.stream = None
