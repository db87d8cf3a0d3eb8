"""SimCLR: a simple framework for contrastive learning (Chen et al., 2020).

    z = normalize([f(x1); f(x2)])                                    two views, one network, 2n embeddings
    loss = mean_i -log( exp(z_i . z_j / tau) / sum_{k != i} exp(z_i . z_k / tau) )       j: the other view of i

All embeddings of other images in the global batch are negatives: embeddings are gathered with their gradient, and every
process computes the loss of the whole batch.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Encoded, StepOutput, width_of
from tico_ssl.methods._embeddings import check_embeddings, unit
from tico_ssl.methods._siamese import Siamese
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.runtime import distributed


class SimCLRTerms(NamedTuple):
    """The loss and its two terms."""

    loss: Tensor
    alignment: Tensor
    uniformity: Tensor


def nt_xent_loss(
    z_1: Tensor,
    z_2: Tensor,
    temperature: float = 0.1,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> SimCLRTerms:
    """NT-Xent, the normalised temperature-scaled cross-entropy, of raw embeddings (n, d) of two views.

        alignment  = -mean_i s_ij / tau                      s: cosines, j: the other view of i
        uniformity = mean_i log sum_{k != i} exp(s_ik / tau)      means over all 2n embeddings
        loss       = alignment + uniformity

    `gather` concatenates the rows of all processes.
    """
    check_embeddings("SimCLR", z_1, z_2)
    if not temperature > 0:
        raise ValueError(f"SimCLR: the temperature must be positive, got {temperature}")
    with torch.autocast(z_1.device.type, enabled=False):
        z_1, z_2 = (gather(unit(z)) for z in (z_1, z_2))
        z = torch.cat([z_1, z_2])
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
        alignment = -(z_1 * z_2).sum(dim=1).mean() / temperature
        uniformity = logits.logsumexp(dim=1).mean()
    return SimCLRTerms(alignment + uniformity, alignment, uniformity)


class Config(MethodConfig):
    """SimCLR's settings; the defaults are the paper's for ImageNet."""

    name: str = "simclr"
    """SimCLR: the other images of the batch as negatives."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the projector's hidden layer."""
    dim: Annotated[int, Field(ge=2)] = 128
    """Dimensions of the embedding."""
    batch_norm: bool = True
    """BatchNorm after each layer of the projector; off: none, and the layers have biases."""
    last_norm_bias: bool = False
    """Bias of the last BatchNorm; the authors' has none."""
    joint_pass: bool = True
    """One forward pass for both views, with common BatchNorm statistics, as in the authors' code; off: one per view."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """Temperature tau: the smaller, the more the nearest negatives count."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the loss, 2 in the authors' code. Under LARS it affects only biases and normalisation parameters."""


class SimCLR(Siamese):
    """Backbone and projector, and NT-Xent between the views.

    At collapse the loss is log(2n - 1), close to that of an untrained network: not indicative.
    """

    config: Config

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        widths = width_of(backbone, width), config.hidden, config.dim
        norm = config.batch_norm
        super().__init__(backbone, head(*widths, norm=norm, last_norm=norm, last_norm_bias=config.last_norm_bias))
        self.config = config
        self.joint_pass = config.joint_pass

    def loss(self, encoded: Encoded) -> StepOutput:
        """NT-Xent of the global batch."""
        z_1, z_2 = encoded.trained
        terms = nt_xent_loss(z_1, z_2, self.config.temperature, gather=distributed.gathered)
        parts = {"alignment": self.config.scale * terms.alignment, "uniformity": self.config.scale * terms.uniformity}
        return StepOutput(self.config.scale * terms.loss, parts, z_1.detach())


def build(config: Config, backbone: Backbone) -> SimCLR:
    """SimCLR of a recipe."""
    return SimCLR(backbone, config=config)
