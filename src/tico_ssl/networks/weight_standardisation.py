"""Weight standardisation (Qiao et al., 2019) of every convolution.

The filter is centred and scaled to unit standard deviation on the fly, with gradient. Parameter names and stored values
stay those of the plain network; `bake` folds the standardisation into the weights of a plain network.
"""

import torch
from torch import Tensor, nn

from tico_ssl.runtime.errors import UserError

EPSILON = 1e-5  # added to the standard deviation


def standardise(weight: Tensor, eps: float = EPSILON) -> Tensor:
    """Zero mean and unit (unbiased) standard deviation per output channel."""
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    return centred / (centred.flatten(1).std(dim=1).view(-1, 1, 1, 1) + eps)


class StandardisedConv2d(nn.Conv2d):
    """A convolution with a standardised kernel."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = super()._conv_forward(input, standardise(weight), bias)
        return output


def apply(model: nn.Module) -> nn.Module:
    """Standardise every convolution whose filters have more than one weight, in place."""
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module.weight[0].numel() == 1:
            continue
        if type(module) not in (nn.Conv2d, StandardisedConv2d):
            raise UserError(f"weight standardisation supports only plain convolutions, not {type(module).__name__}")
        module.__class__ = StandardisedConv2d  # keeps the parameters and the optimiser's references
    return model


@torch.no_grad()
def bake(model: nn.Module) -> nn.Module:
    """Write the standardised kernels into the weights and make the convolutions plain again, in place."""
    for module in model.modules():
        if isinstance(module, StandardisedConv2d):
            module.weight.copy_(standardise(module.weight))
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    return model
