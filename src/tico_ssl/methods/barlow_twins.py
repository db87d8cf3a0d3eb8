"""Barlow Twins: self-supervised learning via redundancy reduction (Zbontar et al., 2021).

    z1 = batchnorm(f(x1));  z2 = batchnorm(f(x2))               each dimension with mean 0 and variance 1, not affine
    c  = z1' z2 / n                                             cross-correlation of the views, d x d
    loss = sum_i (1 - c_ii)^2 + lambda sum_{i != j} c_ij^2      invariance, and no redundancy between dimensions

Mean, variance and correlation are those of the global batch: embeddings are gathered with their gradient, and every
process computes the same loss. The authors' code sums c over processes outside autograd, so that each differentiates
its own share of it; the mean of these gradients over W processes is 1 / W of this one, which is `scale` = 1 / W.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Encoded, StepOutput, width_of
from tico_ssl.methods._embeddings import at_least_float32, check_embeddings
from tico_ssl.methods._siamese import Siamese
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.runtime import distributed


class BarlowTwinsTerms(NamedTuple):
    """The loss and its two terms."""

    loss: Tensor
    invariance: Tensor
    redundancy: Tensor


def barlow_twins_loss(
    z_1: Tensor,
    z_2: Tensor,
    redundancy_weight: float = 0.0051,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> BarlowTwinsTerms:
    """The loss of raw embeddings (n, d) of two views.

        c          = bn(z1)' bn(z2) / n            bn: (z - mean) / sqrt(var + 1e-5), var with n
        invariance = sum_i (1 - c_ii)^2
        redundancy = lambda sum_{i != j} c_ij^2
        loss       = invariance + redundancy

    `gather` concatenates the rows of all processes.
    """
    check_embeddings("Barlow Twins", z_1, z_2)
    with torch.autocast(z_1.device.type, enabled=False):
        z_1, z_2 = (F.batch_norm(gather(at_least_float32(z)), None, None, training=True) for z in (z_1, z_2))
        c = z_1.T @ z_2 / len(z_1)
        invariance = (1 - c.diagonal()).square().sum()
        redundancy = redundancy_weight * off_diagonal(c).square().sum()
    return BarlowTwinsTerms(invariance + redundancy, invariance, redundancy)


def off_diagonal(matrix: Tensor) -> Tensor:
    """The off-diagonal entries of a square matrix, as a view."""
    d = len(matrix)
    return matrix.flatten()[:-1].view(d - 1, d + 1)[:, 1:]


class Config(MethodConfig):
    """Barlow Twins' settings; the defaults are the authors' for ImageNet."""

    name: str = "barlow-twins"
    """Barlow Twins: the cross-correlation of two views is driven to the identity."""
    hidden: Annotated[int, Field(ge=1)] = 8192
    """Width of the projector's hidden layers."""
    hidden_layers: Annotated[int, Field(ge=0)] = 2
    """Number of the projector's hidden layers."""
    dim: Annotated[int, Field(ge=2)] = 8192
    """Dimensions of the embedding."""
    redundancy_weight: Annotated[float, Field(ge=0)] = 0.0051
    """Lambda: weight of the correlations between different dimensions. The paper's text rounds it to 0.005."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the loss. Under LARS it affects only biases, normalisation parameters and the share of weight decay."""


class BarlowTwins(Siamese):
    """Backbone and projector, with the cross-correlation loss."""

    config: Config

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        hidden = [config.hidden] * config.hidden_layers
        super().__init__(backbone, head(width_of(backbone, width), *hidden, config.dim))
        self.config = config

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of the global batch."""
        z_1, z_2 = encoded.trained
        terms = barlow_twins_loss(z_1, z_2, self.config.redundancy_weight, gather=distributed.gathered)
        parts = {"invariance": self.config.scale * terms.invariance, "redundancy": self.config.scale * terms.redundancy}
        return StepOutput(self.config.scale * terms.loss, parts, z_1.detach())

    def collapsed_loss(self) -> float:
        """All correlations are zero: one per dimension."""
        return self.config.scale * self.config.dim


def build(config: Config, backbone: Backbone) -> BarlowTwins:
    """Barlow Twins of a recipe."""
    return BarlowTwins(backbone, config=config)
