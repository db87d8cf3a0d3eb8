"""TiCo: Transformation Invariance and Covariance Contrast (Zhu et al., 2022). The paper's Algorithm 1.

    z1 = normalize(f(x1));  z2 = normalize(f_target(x2))        two views, two networks, n embeddings of d numbers
    B  = z1' z1 / n;        C  = beta C + (1 - beta) B          covariance of the batch, and its moving average
    loss = 1 - mean(z1 . z2) + rho mean(z1 C z1)                invariance, and contrast with recent embeddings
    ... backward, optimiser step ...
    target = ema_decay target + (1 - ema_decay) online

The paper leaves open whether the gradient flows through B. Its pseudo-code says yes, its figure says no. Since B is
quadratic in z1, the gradient through B equals that of a constant B counted twice, so one form covers both:

    C_gradient = beta C + kappa (1 - beta) stop(B),   kappa = 2 (pseudo-code, the default) or 1 (figure, detach=True)

and over several processes only the d x d matrix B is averaged; embeddings are not gathered.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig, ViewShape
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import unit
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.projector import head
from tico_ssl.networks.target import Target, encode_both
from tico_ssl.optim.schedules import cosine_ema_decay
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError

Source = Literal["online", "target"]


class TiCoTerms(NamedTuple):
    """The loss, its two terms, and the updated covariance (detached)."""

    loss: Tensor
    invariance: Tensor
    contrast: Tensor
    covariance: Tensor


def tico_loss(
    online: Tensor,
    target: Tensor,
    covariance: Tensor,
    rho: float = 8.0,
    beta: float = 0.9,
    detach: bool = False,
    source: Source = "online",
    check_finite: bool = True,
    average: Callable[[Tensor], Tensor] = lambda matrix: matrix,
) -> TiCoTerms:
    """TiCo's loss of raw embeddings (n, d) of the two networks, given the covariance (d, d) of the step before.

    `rho` is the weight of the contrast, `beta` the decay of the covariance's moving average. `detach` stops the
    gradient through the batch covariance, `source` is the network whose embeddings form the covariance, and `average`
    is a function that averages a matrix over processes; by default there is one process. `check_finite` synchronises
    with the GPU: turn it off inside a captured step, or for `torch.compile(fullgraph=True)`.

        loss, invariance, contrast, covariance = tico_loss(online, target, covariance)  # at first torch.zeros(d, d)
    """
    _check_settings(rho, beta, source)
    _check_shapes(online, target, covariance)
    if check_finite and not (online.isfinite().all() and target.isfinite().all()):
        raise ValueError("TiCo: the embeddings contain NaN or infinity")
    with torch.autocast(online.device.type, enabled=False):
        z_1 = unit(online)
        z_2 = unit(target.detach().to(z_1.dtype))
        z = (z_1 if source == "online" else z_2).detach()

        B_local = z.T @ z / len(z)
        B = average(B_local)
        C = beta * covariance.detach().to(z.dtype) + (1 - beta) * B

        kappa = 2 if source == "online" and not detach else 1
        extra = (kappa - 1) * (1 - beta) * B
        C_gradient = C + extra
        invariance = 1 - (z_1 * z_2).sum(dim=1).mean()
        # `extra` adds a constant to the value, subtracted here: both readings report the same loss.
        contrast = rho * (((z_1 @ C_gradient) * z_1).sum(dim=1).mean() - (extra * B_local).sum())
    return TiCoTerms(invariance + contrast, invariance, contrast, C.to(covariance.dtype))


def _check_settings(rho: float, beta: float, source: str) -> None:
    if not 0 <= rho < math.inf:
        raise ValueError(f"TiCo: rho must not be negative, got {rho}")
    if not 0 <= beta < 1:
        raise ValueError(f"TiCo: beta must be in [0, 1), got {beta}")
    if source not in ("online", "target"):
        raise ValueError(f"TiCo: source must be 'online' or 'target', got {source!r}")


def _check_shapes(online: Tensor, target: Tensor, covariance: Tensor) -> None:
    if online.ndim != 2 or target.ndim != 2 or online.shape != target.shape:
        raise ValueError(
            "TiCo: online and target embeddings must both be (batch, dim), "
            f"got {tuple(online.shape)} and {tuple(target.shape)}"
        )
    n, d = online.shape
    if n < 2:
        raise ValueError("TiCo: a batch needs at least two images, got one" if n else "TiCo: the batch is empty")
    if covariance.shape != (d, d):
        raise ValueError(f"TiCo: embeddings have {d} dimensions, the covariance is {tuple(covariance.shape)}")


class TiCoLoss(nn.Module):
    """`tico_loss` with its state: `covariance` is a buffer, so it is saved, moved and resumed with the module.

    Called with the raw embeddings (batch, dim) of the online and the target network, it returns the loss. In training
    mode it also updates the covariance, which is averaged over all processes of torch.distributed. `dim` is the
    dimension of the embeddings; `rho`, `beta`, `detach`, `source` and `check_finite` are as in `tico_loss`.

        criterion = TiCoLoss(dim=256)
        loss = criterion(online_embeddings, target_embeddings)
    """

    covariance: Tensor

    def __init__(
        self,
        dim: int = 256,
        rho: float = 8.0,
        beta: float = 0.9,
        detach: bool = False,
        source: Source = "online",
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"TiCo: dim must be positive, got {dim}")
        _check_settings(rho, beta, source)
        self.rho, self.beta, self.detach, self.source = rho, beta, detach, source
        self.check_finite = check_finite
        self.register_buffer("covariance", torch.zeros(dim, dim))

    def forward(self, online: Tensor, target: Tensor) -> Tensor:
        """The loss; in training mode the covariance is updated."""
        return self.terms(online, target).loss

    def terms(self, online: Tensor, target: Tensor) -> TiCoTerms:
        """The loss and its terms; in training mode the covariance is updated."""
        terms = tico_loss(
            online,
            target,
            self.covariance,
            rho=self.rho,
            beta=self.beta,
            detach=self.detach,
            source=self.source,
            check_finite=self.check_finite,
            average=distributed.all_mean if self.training else lambda matrix: matrix,
        )
        if self.training:
            self.covariance.copy_(terms.covariance)
        return terms

    def extra_repr(self) -> str:
        return (
            f"dim={len(self.covariance)}, rho={self.rho}, beta={self.beta}, detach={self.detach}, source={self.source}"
        )


class Config(MethodConfig):
    """TiCo's settings; the defaults are the paper's."""

    name: str = "tico"
    """TiCo, the paper's method."""
    hidden: Annotated[int, Field(ge=1)] = 4096
    """Width of the projector's hidden layer."""
    dim: Annotated[int, Field(ge=2)] = 256
    """Dimensions of the embedding."""
    last_bias: bool = False
    """Bias in the projector's last layer. It adds a common direction to all embeddings, which favours collapse."""
    rho: Annotated[float, Field(ge=0)] = 8.0
    """Weight of the covariance contrast."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the covariance's moving average."""
    detach: bool = False
    """Stop the gradient through the batch covariance (the paper's figure) or not (its pseudo-code)."""
    source: Source = "online"
    """Network whose embeddings form the covariance."""
    ema_start: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Decay of the target encoder at the first step."""
    ema_end: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of the target encoder at the last step, reached along a cosine."""
    symmetric: bool = False
    """Also encode view two by the online and view one by the target network: double cost, not in the paper."""
    target_statistics: Literal["batch", "running"] = "batch"
    """Statistics of the target's BatchNorm: those of its batch (the paper), or the running statistics of the online
    network, which saves a pass over each activation and changes the method."""
    view_order: Literal["fixed", "swapped", "alternate"] = "fixed"
    """View of the online network: the first, the second, or alternating between steps."""

    def check_views(self, views: Sequence[ViewShape]) -> None:
        """Two images; of one size, if they change places."""
        super().check_views(views)
        if self.view_order != "fixed" and views[0].side != views[1].side:
            raise UserError(f"method.view_order={self.view_order} needs two views of the same size")


class TiCo(Method):
    """Backbone and projector, their EMA target, and the loss between the two.

    `width` is that of the backbone's features, by default `backbone.width`; `config` has TiCo's settings.

        method = TiCo(backbone, width=512, config=Config(rho=8.0))  # Config of tico_ssl.methods.tico
    """

    config: Config
    steps: Tensor

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        config = config or Config()
        widths = width_of(backbone, width), config.hidden, config.dim
        super().__init__(backbone, head(*widths, last_bias=config.last_bias))
        self.config = config
        self.target = Target(self.online())
        self.criterion = TiCoLoss(config.dim, config.rho, config.beta, config.detach, config.source, check_finite=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.train()  # the mode of its target depends on the settings

    def train(self, mode: bool = True) -> "TiCo":
        """Training mode; a target with running statistics stays in evaluation mode."""
        super().train(mode)
        if self.config.target_statistics == "running":
            self.target.eval()
        return self

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """f(x1) and, with `fixed`, f_target(x2). Only the first two views are used."""
        view_1, view_2 = self._ordered(*batch.images(2))
        views, others = ((view_1, view_2), (view_2, view_1)) if self.config.symmetric else ((view_1,), (view_2,))
        return Encoded(*encode_both(self.embed_views, views, self.target, others if fixed else ()))

    def loss(self, encoded: Encoded) -> StepOutput:
        """Algorithm 1's loss of the embeddings of a whole batch."""
        terms = self.criterion.terms(torch.cat(encoded.trained), torch.cat(encoded.fixed))
        parts = {"invariance": terms.invariance, "contrast": terms.contrast}
        return StepOutput(terms.loss, parts, encoded.trained[0].detach())

    def _ordered(self, view_1: Tensor, view_2: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.view_order == "fixed":
            return view_1, view_2
        if view_1.shape != view_2.shape:
            raise UserError(f"method.view_order={self.config.view_order} needs two views of the same size")
        if self.config.view_order == "swapped":
            return view_2, view_1
        even = self.steps % 2 == 0
        return torch.where(even, view_1, view_2), torch.where(even, view_2, view_1)

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update the target by the schedule of its EMA decay."""
        decay = cosine_ema_decay(progress, self.config.ema_start, self.config.ema_end)
        self.target.follow(self.online(), decay)
        if self.config.target_statistics == "running":
            self.target.copy_statistics(self.online())
        self.steps += 1
        return {"ema_decay": decay}

    def covariance(self) -> Tensor:
        """Algorithm 1's C."""
        return self.criterion.covariance

    def diagnostics(self) -> dict[str, Tensor]:
        """Participation ratio of the covariance, from 1 (collapse) to dim, and largest eigenvalue over the trace."""
        covariance = self.covariance()
        trace = covariance.trace().clamp_min(1e-12)  # 1 - beta^t: corrects for the zero initialisation
        return {
            "participation_ratio": trace.square() / covariance.square().sum().clamp_min(1e-24),
            "largest_eigenvalue": torch.linalg.eigvalsh(covariance)[-1] / trace,
        }

    def collapsed_loss(self) -> float:
        """Rho: all embeddings are equal, the covariance has rank one."""
        return self.config.rho


def build(config: Config, backbone: Backbone) -> TiCo:
    """TiCo of a recipe."""
    return TiCo(backbone, config=config)
