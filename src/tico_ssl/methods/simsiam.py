"""SimSiam: exploring simple Siamese representation learning (Chen and He, 2021).

    z1 = f(x1);  z2 = f(x2);  p1 = h(z1);  p2 = h(z2)           one network f and a predictor h
    loss = -(cos(p1, stop(z2)) + cos(p2, stop(z1))) / 2         mean over images; gradient only through h

Only the stop-gradient and the predictor prevent collapse. The paper keeps the predictor's learning rate fixed while the
rest follows a cosine (`fix_predictor_rate`): the predictor should adapt to the latest embeddings.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, StepOutput, width_of
from tico_ssl.methods._embeddings import check_embeddings, unit
from tico_ssl.methods._siamese import Siamese
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head


def simsiam_loss(p_1: Tensor, p_2: Tensor, z_1: Tensor, z_2: Tensor) -> Tensor:
    """The loss of predictions and raw embeddings (n, d) of two views.

        loss = -1/2 mean_i [ cos(p1_i, stop(z2_i)) + cos(p2_i, stop(z1_i)) ]

    A mean over images, so processes need not communicate.
    """
    check_embeddings("SimSiam", p_1, z_2)
    check_embeddings("SimSiam", p_2, z_1)
    with torch.autocast(p_1.device.type, enabled=False):
        p_1, p_2 = (unit(p) for p in (p_1, p_2))
        z_1, z_2 = (unit(z.detach()) for z in (z_1, z_2))
        return -((p_1 * z_2).sum(dim=1).mean() + (p_2 * z_1).sum(dim=1).mean()) / 2


class Config(MethodConfig):
    """SimSiam's settings; the defaults are the paper's network for ImageNet."""

    name: str = "simsiam"
    """SimSiam: predict one view from the other, with no negatives and no target network."""
    hidden: Annotated[int, Field(ge=1)] = 2048
    """Width of the projector's hidden layers."""
    hidden_layers: Annotated[int, Field(ge=0)] = 2
    """Number of the projector's hidden layers."""
    dim: Annotated[int, Field(ge=2)] = 2048
    """Dimensions of the embedding."""
    last_affine: bool = False
    """Weights and biases in the projector's last BatchNorm; the authors' code has none."""
    predictor_hidden: Annotated[int, Field(ge=1)] = 512
    """Width of the predictor's hidden layer (bottleneck)."""
    fix_predictor_rate: bool = False
    """Keep the predictor at the peak learning rate, without warm-up and schedule, as in the paper's ImageNet runs."""


class SimSiam(Siamese):
    """Backbone, a projector that ends in a BatchNorm, and a predictor."""

    config: Config

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        widths = width_of(backbone, width), *[config.hidden] * config.hidden_layers, config.dim
        super().__init__(backbone, head(*widths, last_norm=True, last_affine=config.last_affine))
        self.config = config
        self.predictor = head(config.dim, config.predictor_hidden, config.dim, last_bias=True)

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Predictions of both views with gradient, and their embeddings without."""
        embeddings = self.embed_views(batch.images(2))
        predictions = tuple(self.predictor(z) for z in embeddings)
        return Encoded(predictions, tuple(z.detach() for z in embeddings) if fixed else ())

    def fixed_rate(self) -> tuple[nn.Module, ...]:
        """The predictor, if its rate is fixed."""
        return (self.predictor,) if self.config.fix_predictor_rate else ()

    def loss(self, encoded: Encoded) -> StepOutput:
        """SimSiam's loss of this process's images."""
        (p_1, p_2), (z_1, z_2) = encoded.trained, encoded.fixed
        return StepOutput(simsiam_loss(p_1, p_2, z_1, z_2), embedding=z_1)

    def collapsed_loss(self) -> float:
        """Minus one, which is also the loss of a perfect prediction."""
        return -1.0


def build(config: Config, backbone: Backbone) -> SimSiam:
    """SimSiam of a recipe."""
    return SimSiam(backbone, config=config)
