"""LARS as BYOL, Barlow Twins, VICReg and TiCo use it, and its public variants.

For every weight with two or more dimensions, with gradient g:

    g <- g + weight_decay * p                     (coupled: the decay enters the norm)
    g <- g * trust_coefficient * |p| / |g|        (1 where either norm is 0)
    m <- momentum * m + g                         (m starts at 0; the learning rate stays outside)
    p <- p - lr * m

Biases and normalisation parameters (one dimension or none) take the last two lines only, unless `decay_all` gives them
weight decay, or `adapt_all` the second line. Decay and adaptation are independent.

Several public versions differ: they add an epsilon, or fold lr into the momentum. Two variants are available. With
`separate_norms` (apex's LARC, solo-learn) the decay enters by its own norm, and a parameter without gradient has none:

    g <- (g + weight_decay * p) * trust_coefficient * |p| / (|g| + weight_decay * |p| + 1e-8)
         (g where either norm is 0)

With `clip` (solo-learn, LARC by default) lr is an upper bound of the adapted rate, not a factor:

    g <- g * min(trust_coefficient * |p| / |g| / lr, 1)

SGD inside LARC has the last two lines in the same order, so apex's LARC without clipping, over all parameters, is
`separate_norms`, `adapt_all` and `decay_all`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

EPSILON = 1e-8  # of LARC, in the denominator of separate norms


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling, batched over parameters and free of host synchronisation.

    An update of a weight is `trust_coefficient` times as long as the weight, before momentum and learning rate.
    Parameters of one dimension (biases, BatchNorm) get plain momentum without weight decay, unless `adapt_all` and
    `decay_all` give them the adaptation and the decay of weights. `clip` makes the learning rate an upper bound of the
    adapted rate, and `separate_norms` adds the norm of the decay to that of the gradient, as in LARC. The learning rate
    is used as given: scale it with the batch yourself.

        optimizer = LARS(model.parameters(), lr=0.2 * batch / 256, weight_decay=1.5e-6)
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 0.2,
        momentum: float = 0.9,
        weight_decay: float = 1.5e-6,
        trust_coefficient: float = 1e-3,
        clip: bool = False,
        separate_norms: bool = False,
        adapt_all: bool = False,
        decay_all: bool = False,
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
            "separate_norms": separate_norms,
            "adapt_all": adapt_all,
            "decay_all": decay_all,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A state that was saved before an option existed has it off."""
        super().__setstate__(state)
        for group in self.param_groups:
            for option in ("clip", "separate_norms", "adapt_all", "decay_all"):
                group.setdefault(option, False)

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
        directions = _directions(weights, group, group["weight_decay"], adapt=True)
        directions += _directions(
            others, group, group["weight_decay"] if group["decay_all"] else 0.0, adapt=group["adapt_all"]
        )
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


def _directions(params: list[Tensor], group: dict[str, Any], weight_decay: float, adapt: bool) -> list[Tensor]:
    """Gradients with weight decay, each rescaled by its trust ratio if they adapt."""
    gradients = [p.grad for p in params if p.grad is not None]
    if not gradients or not (weight_decay or adapt):
        return gradients
    directions = list(torch._foreach_add(gradients, params, alpha=weight_decay))
    if adapt:
        ratios = _trust_ratios(params, gradients, directions, group, weight_decay)
        torch._foreach_mul_(directions, list(ratios.unbind()))
    return directions


def _trust_ratios(
    params: list[Tensor],
    gradients: list[Tensor],
    directions: list[Tensor],
    group: dict[str, Any],
    weight_decay: float,
) -> Tensor:
    """Factors that make the norm of a direction trust_coefficient times that of its parameter; clipped, that over the
    learning rate, but at most 1."""
    sizes = torch.stack(torch._foreach_norm(params))
    norms = torch.stack(torch._foreach_norm(gradients if group["separate_norms"] else directions))
    total = norms + weight_decay * sizes + EPSILON if group["separate_norms"] else norms
    ratios = group["trust_coefficient"] * sizes / total
    if group["clip"]:
        ratios = (ratios / group["lr"]).clamp(max=1.0)  # a learning rate of zero gives infinity, clipped to one
    ratios = torch.where((sizes > 0) & (norms > 0), ratios, torch.ones_like(ratios))
    if group["separate_norms"]:
        ratios = torch.where(norms > 0, ratios, torch.zeros_like(ratios))  # no gradient, no decay
    return ratios
