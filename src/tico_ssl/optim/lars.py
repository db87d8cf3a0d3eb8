"""LARS as BYOL, Barlow Twins, VICReg and TiCo use it.

For every weight with two or more dimensions, with gradient g:

    g <- g + weight_decay * p                     (coupled: the decay enters the norm)
    g <- g * trust_coefficient * |p| / |g|        (1 where either norm is 0)
    m <- momentum * m + g                         (m starts at 0; the learning rate stays outside)
    p <- p - lr * m

Biases and normalisation parameters (one dimension or none) take the last two lines only.
Several public versions differ: they add an epsilon, take the norm before the decay, or fold lr into the momentum.
One of them is available: with `clip` (solo-learn, LARC) the second line is

    g <- g * min(trust_coefficient * |p| / |g| / lr, 1)

so that lr is an upper bound of the adapted rate, not a factor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling, batched over parameters and free of host synchronisation."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 0.2,
        momentum: float = 0.9,
        weight_decay: float = 1.5e-6,
        trust_coefficient: float = 1e-3,
        clip: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}.items():
            if not float(value) >= 0:  # also catches NaN
                raise ValueError(f"LARS: {name} must not be negative, got {float(value)}")
        if not 0 <= momentum < 1:
            raise ValueError(f"LARS: momentum must be in [0, 1), got {momentum}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "clip": clip,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        weights = [p for p in params if p.ndim > 1]
        others = [p for p in params if p.ndim <= 1]
        lr = group["lr"]
        cap = lr if group.get("clip") else None  # missing in states that were saved before it existed
        directions = _adapted(weights, group["weight_decay"], group["trust_coefficient"], cap) if weights else []
        directions += [p.grad for p in others if p.grad is not None]
        params = weights + others
        momenta = [self._momentum_of(p) for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, directions)
        if isinstance(lr, Tensor):  # a tensor lets a captured step change its rate
            torch._foreach_sub_(params, torch._foreach_mul(momenta, lr))
        else:
            torch._foreach_add_(params, momenta, alpha=-lr)

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _adapted(
    weights: list[Tensor], weight_decay: float, trust_coefficient: float, cap: float | Tensor | None
) -> list[Tensor]:
    """Gradients with weight decay, each rescaled to trust_coefficient times the norm of its weight; with a cap, to that
    over the cap, but never enlarged."""
    gradients = [p.grad for p in weights if p.grad is not None]
    directions = list(torch._foreach_add(gradients, weights, alpha=weight_decay))
    weight_norms = torch.stack(torch._foreach_norm(weights))
    norms = torch.stack(torch._foreach_norm(directions))
    ratios = trust_coefficient * weight_norms / norms
    if cap is not None:
        ratios = (ratios / cap).clamp(max=1.0)  # a learning rate of zero gives infinity, clipped to one
    ratios = torch.where((weight_norms > 0) & (norms > 0), ratios, torch.ones_like(ratios))
    torch._foreach_mul_(directions, list(ratios.unbind()))
    return directions
