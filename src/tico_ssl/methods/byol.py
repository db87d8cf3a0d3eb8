"""BYOL: Bootstrap Your Own Latent (Grill et al., 2020). Predict the target's embedding; no negatives.

    p_i = predictor(f(x_i));  z_i = f_target(x_i)               two views, two networks, n embeddings of d numbers
    loss = mean(2 - 2 cos(p_1, z_2)) + mean(2 - 2 cos(p_2, z_1))
    ... backward, optimiser step ...
    target = ema_decay target + (1 - ema_decay) online          backbone and projector, not the predictor

Each view's embedding by the online network is to predict the other's by the target. Only the online network and the
predictor are trained; without the predictor, embeddings collapse.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.methods._embeddings import check_embeddings, unit
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay


def byol_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """One direction, of raw embeddings (n, d): mean(2 - 2 cos(prediction, target)).

    This is the squared distance of the two unit vectors. Only the prediction gets a gradient.
    """
    check_embeddings("BYOL", prediction, target, least=1)
    with torch.autocast(prediction.device.type, enabled=False):
        return 2 - 2 * (unit(prediction) * unit(target.detach())).sum(dim=1).mean()


class Config(MethodConfig):
    """BYOL's settings; the defaults are the paper's for ImageNet."""

    name: str = "byol"
    """BYOL: prediction of a slowly moving target."""
    hidden: Annotated[int, Field(ge=1)] = 4096
    """Width of the hidden layers of projector and predictor."""
    dim: Annotated[int, Field(ge=2)] = 256
    """Dimensions of the embedding and of its prediction."""
    last_bias: bool = False
    """Biases in the last layers of projector and predictor: not in the authors' code, but in solo-learn and lightly."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.996
    """Decay of the target encoder at the first step."""
    ema_end: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of the target encoder at the last step, reached along a cosine."""


class BYOL(Method):
    """Backbone, projector and predictor, and the slowly moving target of the first two."""

    config: Config

    def __init__(self, backbone: Backbone, config: Config | None = None) -> None:
        config = config or Config()
        super().__init__(backbone, head(backbone.width, config.hidden, config.dim, last_bias=config.last_bias))
        self.config = config
        self.predictor = head(config.dim, config.hidden, config.dim, last_bias=config.last_bias)
        self.target = Target(self.online())

    def predict(self, views: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The online network's predictions of the target's projections of every view."""
        return tuple(self.predictor(embedding) for embedding in self.embed_views(views))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Predictions of the first two views and, with `fixed`, the target's projections of both, in the order of the
        views."""
        views = batch.images(2)
        return Encoded(*encode_both(self.predict, views, self.target, views if fixed else ()))

    def loss(self, encoded: Encoded) -> StepOutput:
        """Both directions: the prediction of each view and the projection of the other."""
        (p_1, p_2), (z_1, z_2) = encoded.trained, encoded.fixed
        first, second = byol_loss(p_1, z_2), byol_loss(p_2, z_1)
        return StepOutput(first + second, {"view_1": first, "view_2": second}, p_1.detach())

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the target by the schedule of its EMA decay."""
        decay = cosine_ema_decay(progress, self.config.ema_start, self.config.ema_end)
        self.target.follow(self.online(), decay)
        return {"ema_decay": decay}

    def collapsed_loss(self) -> float:
        """Zero, the minimum: BYOL's loss does not show a collapse."""
        return 0.0


def build(config: Config, backbone: Backbone) -> BYOL:
    """BYOL of a recipe."""
    return BYOL(backbone, config)
