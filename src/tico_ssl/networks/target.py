"""The target network: an exponential moving average (EMA) of the online network's parameters.

Its BatchNorm runs in training mode with the statistics of its own batches and has its own running statistics; only
parameters are averaged.

Neither network depends on the other before the loss, so a captured step runs the target on a second CUDA stream:
convolutions are compute-bound, the operations between them memory-bound, and small operations leave most of a GPU idle,
so two networks in parallel take less time than in sequence. Only a captured step does so, since its graph contains all
dependencies and has no launch overhead.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from tico_ssl.networks.backbones import each
from tico_ssl.networks.dropping import drop_nothing
from tico_ssl.runtime import distributed

Embeddings = tuple[Tensor, ...]


class Target(nn.Sequential):
    """A copy of the online network that takes no gradient and drops nothing: what the online network is to match has no
    noise of its own."""

    stream: torch.cuda.Stream | None = None  # a second one, set by a captured step

    def __init__(self, online: nn.Sequential) -> None:
        super().__init__(*copy.deepcopy(online))
        self.requires_grad_(False)
        drop_nothing(self)

    @torch.no_grad()
    def follow(self, online: nn.Module, decay: float | Tensor) -> None:
        """target <- decay * target + (1 - decay) * online, over all parameters at once."""
        followers = [distributed.local(parameter) for parameter in self.parameters()]
        leaders = [distributed.local(parameter) for parameter in online.parameters()]
        if isinstance(decay, Tensor):  # a tensor lets a captured step change its decay
            torch._foreach_mul_(followers, decay)
            torch._foreach_add_(followers, list(torch._foreach_mul(leaders, 1 - decay)))
        else:
            torch._foreach_lerp_(followers, leaders, 1 - decay)

    @torch.no_grad()
    def copy_statistics(self, online: nn.Module) -> None:
        """Copy the running statistics of the online network's BatchNorm, for a target in evaluation mode."""
        for mine, theirs in zip(self.buffers(), online.buffers(), strict=True):
            mine.copy_(theirs)


def encode_both(
    online: Callable[[Sequence[Tensor]], Embeddings],
    views: Sequence[Tensor],
    target: Target,
    target_views: Sequence[Tensor],
) -> tuple[Embeddings, Embeddings]:
    """The outputs of the online network for its views and, without gradient, of the target for its own; in parallel if
    there is a second stream. Each view has its own BatchNorm statistics.

    The second stream waits for all work launched before and is joined at the end, so memory freed by either is not
    reused too early. The caller keeps the views alive until then.
    """
    side = target.stream if target_views else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.no_grad(), nullcontext() if side is None else torch.cuda.stream(side):
            fixed = each(target, target_views)
        trained = online(views)
    finally:
        if side is not None:  # also on an exception: a capture must not end with an unjoined stream
            torch.cuda.current_stream().wait_stream(side)
    return trained, fixed


@contextmanager
def overlapping(method: nn.Module, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within, the targets in a method have a second stream."""
    targets = [module for module in method.modules() if isinstance(module, Target)]
    for target in targets:
        target.stream = stream
    try:
        yield
    finally:
        for target in targets:
            target.stream = None
