"""What the rooms hand to each other: a batch of views, the outcome of a step, and what every method promises."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """One training batch: global views first, then local crops; every view has the same images in the same order."""

    views: tuple[Tensor, ...]
    index: Tensor
    label: Tensor | None = None


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


@runtime_checkable
class Method(Protocol):
    """A self-supervised objective around a backbone. All state is in parameters and buffers."""

    backbone: nn.Module

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of one batch: that of what it is encoded to."""
        ...

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """The embeddings of a batch or a part of one; without `fixed`, only those that take a gradient."""
        ...

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of a whole batch of embeddings."""
        ...

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Move target, queue or prototypes after the optimiser; progress runs from 0 to 1. Returns values to log."""
        ...

    def diagnostics(self) -> dict[str, Tensor]:
        """Values that are too costly for every step, asked for at log steps."""
        ...

    def collapsed_loss(self) -> float | None:
        """The loss of a network that maps every image to one point, when that value is known."""
        ...
