"""Candidates for a better TiCo, each a setting; with the defaults it is the package's TiCo. A method out of the
package, used by its import path (one process):

    python -m tico_ssl pretrain cifar10/tico --data c10.npz method.name=benchmarks.tico_candidates method.centred=true
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.methods import tico
from tico_ssl.methods._base import Batch, Encoded, StepOutput
from tico_ssl.methods._embeddings import unit
from tico_ssl.methods.tico import TiCo
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import encode_both
from tico_ssl.runtime.errors import UserError


class Config(tico.Config):
    """The package's TiCo, unless a setting says otherwise."""

    name: str = "benchmarks.tico_candidates"
    """TiCo with candidates for improvements."""
    target_views: Annotated[int, Field(ge=1)] = 1
    """Views from the second on that the target encodes; the online network is to match the mean of its embeddings.
    All further views go through the online network, as view one does."""
    predictor: Annotated[int, Field(ge=0)] = 0
    """Hidden width of a predictor between the online embedding and the target's; 0: none. The contrast is without."""
    centred: bool = False
    """The contrast is with the centred covariance instead of the second moment."""
    contrast: Literal["linear", "log"] = "linear"
    """rho x contrast, or rho x its logarithm, whose gradient grows as the spectrum flattens."""


class Candidate(TiCo):
    """TiCo by plain autograd, with more views and other contrasts."""

    config: Config

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config=config)
        width = config.predictor
        self.predictor = head(config.dim, width, config.dim) if width else torch.nn.Identity()

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """f of view one and of those after the target's, and f_target of the target's."""
        views, last = batch.images(), 1 + self.config.target_views
        if len(views) < last:
            raise UserError(
                f"method.target_views={self.config.target_views} needs {last} views, there are {len(views)}"
            )
        view_1, view_2 = self._ordered(views[0], views[1])
        others = (view_2, *views[2:last]) if fixed else ()
        return Encoded(*encode_both(self.embed_views, (view_1, *views[last:]), self.target, others))

    def loss(self, encoded: Encoded) -> StepOutput:
        """Invariance against the mean of the target's embeddings, contrast of all of the online network's."""
        online, target = encoded.trained, sum(unit(one) for one in encoded.fixed)
        assert isinstance(target, Tensor)
        with torch.autocast(online[0].device.type, enabled=False):
            predicted = [unit(self.predictor(one.float())) for one in online]
            invariance = 1 - torch.stack([(one * unit(target)).sum(dim=1).mean() for one in predicted]).mean()
            contrast = self.config.rho * self._contrast(torch.cat([unit(one) for one in online]))
        loss = invariance + contrast
        return StepOutput(loss, {"invariance": invariance, "contrast": contrast}, online[0].detach())

    def _contrast(self, z: Tensor) -> Tensor:
        z = z - z.mean(dim=0) if self.config.centred else z
        beta, before = self.config.beta, self.criterion.covariance
        B = z.T @ z / len(z)
        C = beta * before.clone() + (1 - beta) * (B.detach() if self.config.detach else B)
        if self.training:
            before.copy_(C.detach())
        overlap = ((z @ C) * z).sum(dim=1).mean()
        return overlap if self.config.contrast == "linear" else torch.log(overlap / C.trace().detach())


def build(config: Config, backbone: Backbone) -> Candidate:
    """The candidate of a recipe."""
    return Candidate(backbone, config)
