"""What the rooms hand to each other: a batch of views, the outcome of a step, and what every method promises."""

from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from tico_ssl.config import catalogue
from tico_ssl.config.section import MethodConfig
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One training batch: global views first, then local crops; every view has the same images in the same order."""

    views: tuple[Tensor, ...]
    index: Tensor
    label: Tensor | None = None

    def images(self, count: int | None = None) -> tuple[Tensor, ...]:
        """The first so many views, or all, which must be images."""
        views = self.views[:count]
        if any(view.ndim != 4 for view in views):
            which = "views" if count is None else "first view" if count == 1 else f"first {count} views"
            raise UserError(f"this method's {which} must be images, not jigsaws")
        return views


@dataclass(frozen=True)
class Encoded:
    """What networks make of a batch, all that a loss looks at: embeddings that take a gradient, and those that do not.
    Their first axis counts the images, so parts of a batch can be put together."""

    trained: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """What a method returns: the scalar to minimise, its parts for the log, and detached embeddings for the monitor."""

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    embedding: Tensor | None = None


class Method(nn.Module):
    """A self-supervised objective around a backbone. All state is in parameters and buffers; what a method does not
    need it inherits."""

    backbone: Backbone
    projector: nn.Module | None
    config: MethodConfig

    def __init__(self, backbone: nn.Module, projector: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = cast(Backbone, backbone)  # in someone's own loop any module that gives features will do
        self.projector = projector

    def online(self) -> nn.Sequential:
        """Backbone and projector: the network that a target is a copy of."""
        return nn.Sequential(*(part for part in (self.backbone, self.projector) if part is not None))

    def embed(self, images: Tensor) -> Tensor:
        """Raw embeddings of the online network: the projector's or, without one, the backbone's features."""
        features = self.backbone(images)
        embeddings: Tensor = features if self.projector is None else self.projector(features)
        return embeddings

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of one batch: that of what it is encoded to."""
        return self.loss(self.encode(batch))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """The embeddings of a batch or a part of one; without `fixed`, only those that take a gradient."""
        raise NotImplementedError

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch of embeddings."""
        raise NotImplementedError

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Move target, queue or prototypes after the optimiser; progress runs from 0 to 1. Returns values to log."""
        return {}

    def covariance(self) -> Tensor | None:
        """The moving covariance (d, d) of embeddings, if the method keeps one: the monitor records its spectrum."""
        return None

    def diagnostics(self) -> dict[str, Tensor]:
        """Values that are too costly for every step, asked for at log steps."""
        return {}

    def collapsed_loss(self) -> float | None:
        """The loss of a network that maps every image to one point, when that value is known and means something."""
        return None

    def check_data(self, images: int, labels: Tensor | None) -> None:
        """Raise UserError if training images, so many and with these labels, do not suit the method. Asked before
        training begins: a step on a GPU looks at no value."""


def width_of(backbone: nn.Module, width: int | None = None) -> int:
    """How many features a backbone gives, as said by the caller or by itself."""
    found = width if width is not None else getattr(backbone, "width", None)
    if found is None:
        raise ValueError("say how many features the backbone gives, for example width=512")
    return int(found)


def build_method(config: MethodConfig, backbone: Backbone) -> Method:
    """The method that a recipe names, around a backbone."""
    module = catalogue.load("methods", config.name)
    own = module.Config.model_validate(config.model_dump())  # a recipe's settings are read without the module's code
    method = module.build(own, backbone)
    if not isinstance(method, Method):
        raise UserError(f"method '{config.name}': what its build returns is no tico_ssl.methods.Method")
    return method
