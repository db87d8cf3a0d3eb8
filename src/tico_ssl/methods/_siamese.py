"""One network for two views: what methods have in common that compare the views of a batch, and the heads they use."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
from tico_ssl.runtime.errors import UserError


class Siamese(Method):
    """Backbone and projector. Each view goes through them in a forward of its own: in one batch the views would share
    BatchNorm statistics. Nothing moves after a step, and there is no state but theirs."""

    def __init__(self, backbone: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector

    def embed(self, images: Tensor) -> Tensor:
        """Raw embeddings."""
        return self.projector(self.backbone(images))

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of a batch. Views beyond the first two are not looked at."""
        return self.loss(self.encode(batch))

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Embeddings of the two views; both take a gradient."""
        view_1, view_2 = two_images(batch)
        return Encoded((self.embed(view_1), self.embed(view_2)))

    def loss(self, encoded: Encoded) -> StepOutput:
        """The loss of the embeddings of a whole batch."""
        raise NotImplementedError

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Nothing follows the network."""
        return {}

    def diagnostics(self) -> dict[str, Tensor]:
        """Nothing beyond the terms of the loss."""
        return {}


def two_images(batch: Batch) -> tuple[Tensor, Tensor]:
    """The first two views, which must be images."""
    view_1, view_2 = batch.views[:2]
    if view_1.ndim != 4 or view_2.ndim != 4:
        raise UserError("this method compares views that are images: its first two must not be jigsaws")
    return view_1, view_2


def width_of(backbone: nn.Module, width: int | None = None) -> int:
    """How many features a backbone gives, as said by the caller or by itself."""
    found: Any = width if width is not None else getattr(backbone, "width", None)
    if found is None:
        raise ValueError("say how many features the backbone gives, for example width=512")
    return int(found)


def head(*widths: int, norm: bool = True, last_norm: bool = False, last_affine: bool = True) -> nn.Sequential:
    """Linear layers with BatchNorm (if `norm`) and ReLU between them; behind the last, BatchNorm if `last_norm`.

    A layer before a BatchNorm has no bias, and neither has the last of a head with BatchNorm.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after, bias=not norm)]
        layers += [nn.BatchNorm1d(after)] if norm else []
        layers += [nn.ReLU(inplace=True)]
    layers += [nn.Linear(widths[-2], widths[-1], bias=not norm)]
    layers += [nn.BatchNorm1d(widths[-1], affine=last_affine)] if last_norm else []
    return nn.Sequential(*layers)


def check_embeddings(name: str, z_1: Tensor, z_2: Tensor) -> None:
    """Two matrices (n, d) of one shape, with two images at least."""
    if z_1.ndim != 2 or z_1.shape != z_2.shape:
        raise ValueError(
            f"{name}: the embeddings of both views must be (batch, dim), got {tuple(z_1.shape)} and {tuple(z_2.shape)}"
        )
    if len(z_1) < 2:
        raise ValueError(f"{name}: a batch needs at least two images, got {len(z_1)}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 or better, whatever autocast made of it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
