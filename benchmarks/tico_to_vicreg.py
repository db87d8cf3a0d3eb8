"""Losses between TiCo and VICReg: each difference of the two is a setting, so that one leads to the other in single
steps. With the defaults it is TiCo; `spread=hinge lengths=free centred=true partner=online` is VICReg. A method out of
the package, used by its import path (one process):

    python -m tico_ssl study benchmarks/studies/tico-to-vicreg.yaml --data cifar10.npz
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.methods._embeddings import at_least_float32, unit
from tico_ssl.methods.barlow_twins import off_diagonal
from tico_ssl.methods.vicreg import EPSILON
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay


class Config(MethodConfig):
    """TiCo, unless a setting says otherwise."""

    name: str = "benchmarks.tico_to_vicreg"
    """A loss between TiCo and VICReg."""
    hidden: Annotated[int, Field(ge=1)] = 4096
    """Width of the projector's hidden layers."""
    hidden_layers: Annotated[int, Field(ge=1)] = 1
    """Hidden layers of the projector: one in TiCo, two in VICReg."""
    dim: Annotated[int, Field(ge=2)] = 256
    """Dimensions of the embedding."""
    lengths: Literal["unit", "free"] = "unit"
    """Embeddings are divided by their lengths, or left as they are."""
    partner: Literal["target", "online"] = "target"
    """What view one is to agree with: view two of the target, or of the online network itself, with gradient."""
    spread: Literal["overlap", "hinge"] = "overlap"
    """What keeps embeddings apart: rho x overlap with the moment matrix, or VICReg's variance and covariance."""
    centred: bool = False
    """The moment matrix is the covariance instead of the second moment."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the moment matrix's moving average, of `overlap`; 0: of the batch alone."""
    rho: Annotated[float, Field(ge=0)] = 8.0
    """Weight of the overlap."""
    invariance_weight: float = 25.0
    """Weight of the squared distance, of `hinge`."""
    variance_weight: float = 25.0
    """Weight of the hinge, mean over the views, of `hinge`."""
    covariance_weight: float = 1.0
    """Weight of the squared covariances, sum over two views, of `hinge`."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Decay of the target at the first step; 1 at the last."""

    @model_validator(mode="after")
    def _bounded(self) -> "Config":
        if self.lengths == "free" and self.spread == "overlap":
            raise ValueError("lengths=free spread=overlap: the overlap is smallest at zero, so everything shrinks")
        return self


class Between(Method):
    """Backbone, projector, their target, and the loss that the settings make."""

    config: Config
    moment: Tensor

    def __init__(self, backbone: Backbone, config: Config) -> None:
        widths = [backbone.width, *[config.hidden] * config.hidden_layers, config.dim]
        super().__init__(backbone, head(*widths))
        self.config = config
        self.target = Target(self.online()) if config.partner == "target" else None
        self.register_buffer("moment", torch.zeros(config.dim, config.dim))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Both views with gradient, or the second by the target."""
        view_1, view_2 = batch.images(2)
        if self.target is None:
            return Encoded(self.embed_views((view_1, view_2)))
        return Encoded(*encode_both(self.embed_views, (view_1,), self.target, (view_2,) if fixed else ()))

    def loss(self, encoded: Encoded) -> StepOutput:
        """Agreement of the two views, and what keeps those with gradient apart, as a mean over them."""
        config, trained = self.config, len(encoded.trained)
        with torch.autocast(encoded.trained[0].device.type, enabled=False):
            z = [self._scaled(one) for one in encoded.trained + encoded.fixed]
            if config.spread == "overlap":
                invariance = (z[0] - z[1]).square().sum(dim=1).mean() / 2  # 1 - cosine of unit embeddings
                spread = config.rho * self._overlap(z[:trained])
            else:
                invariance = config.invariance_weight * (z[0] - z[1]).square().mean()
                spread = torch.stack([self._hinge(one) for one in z[:trained]]).mean()
        loss = invariance + spread
        return StepOutput(loss, {"invariance": invariance, "spread": spread}, encoded.trained[0].detach())

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the target, if there is one."""
        if self.target is None:
            return {}
        decay = cosine_ema_decay(progress, self.config.ema_start, 1.0)
        self.target.follow(self.online(), decay)
        return {"ema_decay": decay}

    def _scaled(self, embeddings: Tensor) -> Tensor:
        """Unit embeddings have a mean square of 1 / d per dimension; the hinge wants a standard deviation of 1."""
        if self.config.lengths == "free":
            return at_least_float32(embeddings)
        return unit(embeddings) * (1 if self.config.spread == "overlap" else self.config.dim**0.5)

    def _overlap(self, views: list[Tensor]) -> Tensor:
        beta = self.config.beta
        z = [one - one.mean(dim=0) if self.config.centred else one for one in views]
        batch = torch.stack([one.T @ one / len(one) for one in z]).mean(dim=0)
        moment = beta * self.moment.clone() + (1 - beta) * batch
        if self.training:
            self.moment.copy_(moment.detach())
        return torch.stack([((one @ moment) * one).sum(dim=1).mean() for one in z]).mean()

    def _hinge(self, z: Tensor) -> Tensor:
        n, d = z.shape
        z = z - z.mean(dim=0) if self.config.centred else z
        moment = z.T @ z / (n - 1)
        variance = F.relu(1 - (moment.diagonal() + EPSILON).sqrt()).mean()
        covariance = off_diagonal(moment).square().sum() / d
        return self.config.variance_weight * variance + 2 * self.config.covariance_weight * covariance


def build(config: Config, backbone: Backbone) -> Between:
    """The loss of a recipe."""
    return Between(backbone, config)
