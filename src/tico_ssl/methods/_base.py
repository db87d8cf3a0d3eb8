"""The interface of methods: batch, embeddings, step output and the base class."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn

from tico_ssl.config import catalogue
from tico_ssl.config.section import MethodConfig
from tico_ssl.networks.backbones import Backbone, each
from tico_ssl.runtime.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One training batch: global views first, then local crops; every view has the same images in the same order."""

    views: tuple[Tensor, ...]
    index: Tensor
    label: Tensor | None = None

    def images(self, count: int | None = None) -> tuple[Tensor, ...]:
        """The first `count` views, or all; they must be images, not jigsaws."""
        views = self.views[:count]
        if any(view.ndim != 4 for view in views):
            which = "views" if count is None else "first view" if count == 1 else f"first {count} views"
            raise UserError(f"this method's {which} must be images, not jigsaws")
        return views


@dataclass(frozen=True)
class Encoded:
    """The networks' outputs for a batch, the only input of the loss: embeddings with gradient (`trained`) and without
    (`fixed`). Their first axis is the image, so parts of a batch can be concatenated."""

    trained: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """The scalar to minimise, its terms for the log, and detached embeddings for the monitor."""

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    embedding: Tensor | None = None


class Method(nn.Module):
    """A self-supervised objective around a backbone. All state is in parameters and buffers; optional hooks have
    defaults."""

    backbone: Backbone
    projector: nn.Module | None
    config: MethodConfig

    def __init__(self, backbone: nn.Module, projector: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = cast(Backbone, backbone)  # in a custom training loop, any module that returns features
        self.projector = projector

    def online(self) -> nn.Sequential:
        """Backbone and projector: the network that a target copies."""
        return nn.Sequential(*self._parts())

    def _parts(self) -> tuple[nn.Module, ...]:
        return (self.backbone,) if self.projector is None else (self.backbone, self.projector)

    def embed(self, images: Tensor) -> Tensor:
        """Raw embeddings of the online network: the projector's output or, without one, the backbone's features."""
        features = self.backbone(images)
        embeddings: Tensor = features if self.projector is None else self.projector(features)
        return embeddings

    def embed_views(self, views: Sequence[Tensor], joint: bool = False) -> tuple[Tensor, ...]:
        """Raw embeddings of every view. By default BatchNorm has the statistics of each view. If `joint`, it has those
        of all views: consecutive views of one size go through the backbone together, then all through the projector."""
        if not joint:
            return each(self._parts(), views)
        sizes = groupby(views, key=lambda view: view.shape[1:])
        features = torch.cat([self.backbone(torch.cat(list(same))) for _, same in sizes])
        embeddings: Tensor = features if self.projector is None else self.projector(features)
        return embeddings.chunk(len(views))

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of one batch."""
        return self.loss(self.encode(batch))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """The embeddings of a batch or a part of one; without `fixed`, only those with gradient."""
        raise NotImplementedError

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch of embeddings."""
        raise NotImplementedError

    def fixed_rate(self) -> tuple[nn.Module, ...]:
        """Modules that keep the peak learning rate from the first step to the last, outside warm-up and schedule."""
        return ()

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Update target, queue or prototypes after the optimiser; progress runs from 0 to 1. Returns values to log."""
        return {}

    def covariance(self) -> Tensor | None:
        """The moving covariance (d, d) of embeddings, if the method has one: the monitor logs its spectrum."""
        return None

    def diagnostics(self) -> dict[str, Tensor]:
        """Metrics that are too costly for every step, computed at log steps."""
        return {}

    def collapsed_loss(self) -> float | None:
        """The loss of a collapsed network, which maps every image to one point, if it is known and indicative."""
        return None

    def check_data(self, images: int, labels: Tensor | None) -> None:
        """Raise UserError if the number of training images or their labels do not suit the method. Called before
        training, since a step must not synchronise with the host."""


def width_of(backbone: nn.Module, width: int | None = None) -> int:
    """The feature width of a backbone, given by the caller or by the backbone."""
    found = width if width is not None else getattr(backbone, "width", None)
    if found is None:
        raise ValueError("pass the backbone's number of features, for example width=512")
    return int(found)


def build_method(config: MethodConfig, backbone: Backbone) -> Method:
    """The method of a recipe, around a backbone."""
    module = catalogue.load("methods", config.name)
    own = module.Config.model_validate(config.model_dump())  # settings were read without importing the module
    method = module.build(own, backbone)
    if not isinstance(method, Method):
        raise UserError(f"method '{config.name}': its build does not return a tico_ssl.methods.Method")
    return method
