"""The squared contrastive loss (Zhu et al., 2022): TiCo with its keys written out, in a batch or in a memory bank.

    z' = normalize(f(x1));  z'' = normalize(f_target(x2))       two views, two networks, n embeddings of d numbers

    in a batch     loss = -(1/n) sum_i z'_i.z''_i + (rho / n^2)  sum_i sum_{j != i}  (z'_i.z''_j)^2
    in a bank      loss = -(1/n) sum_i z'_i.z''_i + (rho / n m)  sum_i sum_{j <= m}  (z'_i.z''_j)^2

    ... backward, optimiser step ...
    target = ema_decay target + (1 - ema_decay) online

The bank has this step's keys and the m - n before them, of all processes, without gradient. The sum of squares over the
keys is a quadratic form, (1/m) sum_j (z.z''_j)^2 = z C z with C the keys' second moment: TiCo's contrast, whose C is a
moving average instead. Here, too, C is computed, not the n m cosines.

The bank is initialised with zeros, as TiCo's covariance is, so the contrast ramps up while the bank fills.
"""

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.methods._embeddings import check_embeddings, unit
from tico_ssl.methods._queue import KeyQueue
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError


class SquaredContrastiveTerms(NamedTuple):
    """The loss and its two terms."""

    loss: Tensor
    invariance: Tensor
    contrast: Tensor


def squared_contrastive_loss(
    online: Tensor, target: Tensor, keys: Tensor | None = None, rho: float = 8.0, leave_out_own: bool = True
) -> SquaredContrastiveTerms:
    """The loss of raw embeddings (n, d) of the two networks, and m unit vectors (m, d) to contrast with.

        -mean(z'_i.z''_i) + (rho / n m) sum_i sum_j (z'_i.key_j)^2

    The keys are by default the target's own embeddings, the paper's form in a batch; `leave_out_own` excludes each
    image's own key from the second sum; it is off for a memory bank. Only the online embeddings get a gradient.
    """
    _check(online, target, keys, rho)
    with torch.autocast(online.device.type, enabled=False):
        z_1, z_2 = unit(online), unit(target.detach())
        others = (z_2 if keys is None else keys.detach()).to(z_1.dtype)
        C = others.T @ others / len(others)
        cosines = (z_1 * z_2).sum(dim=1)
        squares = ((z_1 @ C) * z_1).sum(dim=1)
        if leave_out_own:
            squares = squares - cosines.square() / len(others)
        invariance = -cosines.mean()
        contrast = rho * squares.mean()
    return SquaredContrastiveTerms(invariance + contrast, invariance, contrast)


def _check(online: Tensor, target: Tensor, keys: Tensor | None, rho: float) -> None:
    if rho < 0:
        raise ValueError(f"squared contrastive loss: rho must not be negative, got {rho}")
    check_embeddings("squared contrastive loss", online, target, least=1)
    if keys is not None and (keys.ndim != 2 or keys.shape[1] != online.shape[1]):
        raise ValueError(
            f"squared contrastive loss: embeddings have {online.shape[1]} dimensions, the keys are {tuple(keys.shape)}"
        )


class Config(MethodConfig):
    """Settings of the squared contrastive loss. The paper gives none; the defaults are its TiCo's."""

    name: str = "squared-contrastive"
    """The paper's squared contrastive loss, in a batch or with a memory bank."""
    hidden: Annotated[int, Field(ge=1)] = 4096
    """Width of the projector's hidden layer."""
    dim: Annotated[int, Field(ge=2)] = 256
    """Dimensions of the embedding."""
    last_bias: bool = False
    """Bias in the projector's last layer. It adds a common direction to all embeddings, which favours collapse."""
    rho: Annotated[float, Field(ge=0)] = 8.0
    """Weight of the contrast."""
    bank: Annotated[int, Field(ge=0)] = 0
    """Keys in the memory bank, a multiple of the batch; 0: contrast with the other images of the batch alone."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Decay of the target encoder at the first step."""
    ema_end: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of the target encoder at the last step, reached along a cosine."""

    def check_batch(self, batch: int, together: int) -> None:
        """A bank that a whole number of steps fills."""
        if self.bank % batch:
            raise UserError(f"method.bank {self.bank} is not a multiple of the {batch} keys that a step adds to it")


class SquaredContrastive(Method):
    """Backbone and projector, their EMA target, and optionally a memory bank of its keys."""

    config: Config

    def __init__(self, backbone: Backbone, config: Config | None = None) -> None:
        config = config or Config()
        super().__init__(backbone, head(backbone.width, config.hidden, config.dim, last_bias=config.last_bias))
        self.config = config
        self.target = Target(self.online())
        self.bank = KeyQueue(torch.zeros(config.bank, config.dim)) if config.bank else None

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of view one by the online network and, with `fixed`, of view two by the target."""
        view_1, view_2 = batch.images(2)
        return Encoded(*encode_both(self.embed_views, (view_1,), self.target, (view_2,) if fixed else ()))

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch: this process's images, the keys of all; in training mode the bank is updated."""
        (online,), (target,) = encoded.trained, encoded.fixed
        keys = distributed.gathered(unit(target.detach()))
        if self.bank is None:
            terms = squared_contrastive_loss(online, target, keys, self.config.rho)
        else:
            with_these = self.bank.with_keys(keys)
            terms = squared_contrastive_loss(online, target, with_these, self.config.rho, leave_out_own=False)
            if self.training:
                self.bank.enqueue(keys)
        parts = {"invariance": terms.invariance, "contrast": terms.contrast}
        return StepOutput(terms.loss, parts, online.detach())

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the target by the schedule of its EMA decay."""
        decay = cosine_ema_decay(progress, self.config.ema_start, self.config.ema_end)
        self.target.follow(self.online(), decay)
        return {"ema_decay": decay}

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the bank, if there is one."""
        return {} if self.bank is None else self.bank.diagnostics("bank")

    def collapsed_loss(self) -> float:
        """Rho - 1: every cosine is one. Without a bank the own key is excluded, which subtracts rho / n."""
        return self.config.rho - 1


def build(config: Config, backbone: Backbone) -> SquaredContrastive:
    """The squared contrastive loss of a recipe."""
    return SquaredContrastive(backbone, config)
