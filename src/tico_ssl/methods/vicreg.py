"""VICReg: variance-invariance-covariance regularisation (Bardes et al., 2022).

    z1 = f(x1);  z2 = f(x2)                                              two views, one network, no normalisation
    loss = 25 mean (z1 - z2)^2                                           invariance
         + 25/2 sum_{z in z1, z2} mean_j max(0, 1 - sqrt(var_j + 1e-4))  variance: no dimension is constant
         +  1  sum_{z in z1, z2} sum_{i != j} cov_ij^2 / d               covariance: no dimension is redundant

The factor 1/2 of the variance term follows the authors' code; a weight of 25 without it is 50 here. Variance and
covariance (with n - 1) are those of the global batch: embeddings are gathered with their gradient, and every process
computes the same loss.
"""

import math
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
from tico_ssl.methods.barlow_twins import off_diagonal
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.runtime import distributed

EPSILON = 1e-4  # under the square root, whose derivative at zero is infinite


class VICRegTerms(NamedTuple):
    """The loss and its three weighted terms."""

    loss: Tensor
    invariance: Tensor
    variance: Tensor
    covariance: Tensor


def vicreg_loss(
    z_1: Tensor,
    z_2: Tensor,
    invariance_weight: float = 25.0,
    variance_weight: float = 25.0,
    covariance_weight: float = 1.0,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> VICRegTerms:
    """The loss of raw embeddings (n, d) of two views.

        invariance = w_i mean_{k, j} (z1_kj - z2_kj)^2
        variance   = w_v / 2 sum_z mean_j max(0, 1 - sqrt(cov_jj + 1e-4))
        covariance = w_c sum_z sum_{i != j} cov_ij^2 / d          cov: (z - mean)' (z - mean) / (n - 1) of z1, of z2
        loss       = invariance + variance + covariance

    `gather` concatenates the rows of all processes.
    """
    check_embeddings("VICReg", z_1, z_2)
    with torch.autocast(z_1.device.type, enabled=False):
        z_1, z_2 = (gather(at_least_float32(z)) for z in (z_1, z_2))
        invariance = invariance_weight * (z_1 - z_2).square().mean()
        hinges, correlations = zip(*(_regularities(z) for z in (z_1, z_2)))
        variance = variance_weight / 2 * (hinges[0] + hinges[1])
        covariance = covariance_weight * (correlations[0] + correlations[1])
    return VICRegTerms(invariance + variance + covariance, invariance, variance, covariance)


def _regularities(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean hinge of standard deviations below one, and sum of squared covariances between dimensions over d."""
    n, d = z.shape
    centred = z - z.mean(dim=0)
    deviation = (centred.square().sum(dim=0) / (n - 1) + EPSILON).sqrt()
    covariance = centred.T @ centred / (n - 1)
    return F.relu(1 - deviation).mean(), off_diagonal(covariance).square().sum() / d


class Config(MethodConfig):
    """VICReg's settings; the defaults are the paper's for ImageNet."""

    name: str = "vicreg"
    """VICReg: invariance between views, variance in every dimension, no covariance between dimensions."""
    hidden: Annotated[int, Field(ge=1)] = 8192
    """Width of the projector's two hidden layers."""
    dim: Annotated[int, Field(ge=2)] = 8192
    """Dimensions of the embedding."""
    invariance_weight: Annotated[float, Field(ge=0)] = 25.0
    """Weight of the mean squared distance between views."""
    variance_weight: Annotated[float, Field(ge=0)] = 25.0
    """Weight of the hinge of standard deviations below one, mean over the views."""
    covariance_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the squared covariances, sum over the views."""


class VICReg(Siamese):
    """Backbone and a three-layer projector, with the three terms."""

    config: Config

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        super().__init__(backbone, head(width_of(backbone, width), config.hidden, config.hidden, config.dim))
        self.config = config

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of the global batch."""
        config = self.config
        z_1, z_2 = encoded.trained
        terms = vicreg_loss(
            z_1,
            z_2,
            config.invariance_weight,
            config.variance_weight,
            config.covariance_weight,
            gather=distributed.gathered,
        )
        parts = {"invariance": terms.invariance, "variance": terms.variance, "covariance": terms.covariance}
        return StepOutput(terms.loss, parts, z_1.detach())

    def collapsed_loss(self) -> float:
        """The variance term alone, with no variance."""
        return self.config.variance_weight * (1 - math.sqrt(EPSILON))


def build(config: Config, backbone: Backbone) -> VICReg:
    """VICReg of a recipe."""
    return VICReg(backbone, config=config)
