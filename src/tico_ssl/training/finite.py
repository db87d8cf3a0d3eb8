"""Whether the loss and the whole state of a training are finite: asked at log steps and before every checkpoint.

A loss is computed before the update of its step, so the state is looked at too: weights, BatchNorm statistics, target,
queue, and what the optimiser keeps. It takes one reduction on the device, and one wait for its result.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tico_ssl.methods._base import StepOutput
from tico_ssl.runtime import distributed


class Watch:
    """Looks at one training. `good` is the last step after which everything was seen to be finite, `saved` that of the
    last checkpoint."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, start: int) -> None:
        self.module, self.optimizer, self.good, self.saved = module, optimizer, start, start

    def faults(self, done: int, output: StepOutput) -> list[str]:
        """What is not finite after a step, in words; nothing if all is well. A collective call."""
        seen = {"the loss": output.loss} | ({} if output.embedding is None else {"the embeddings": output.embedding})
        found = not_finite(seen | state_of(self.module, self.optimizer))
        if found and not output.loss.isfinite():
            found += [f"the term '{name}'" for name in not_finite(output.terms)]
        if not distributed.anyone(bool(found)):
            self.good = done
        elif not found:
            found = ["a loss in another process"]
        return found


def state_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name: parameters, buffers, and what the optimiser keeps of each parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    state: dict[str, Tensor] = dict(module.state_dict())
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.ndim == parameter.ndim > 0:  # not a counter of steps
                state[f"{key} of {names.get(parameter, 'a parameter')}"] = value
    return state


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a value that is NaN or infinite."""
    own = {name: distributed.local(value.detach()) for name, value in tensors.items()}
    numbers = {name: value for name, value in own.items() if value.is_floating_point() and value.numel()}
    if not numbers:
        return []
    largest = torch.stack(torch._foreach_norm(list(numbers.values()), math.inf))  # NaN if any value is
    finite: list[bool] = largest.isfinite().tolist()
    return [name for name, sound in zip(numbers, finite, strict=True) if not sound]
