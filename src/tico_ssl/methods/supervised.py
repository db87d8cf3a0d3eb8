"""Supervised: the backbone with a linear classifier, trained with labels. The baseline of self-supervision.

    loss = - mean_i log softmax(W f(x_i) + b)[y_i]          cross entropy; x one view, y its image's label

The classifier is trained along with the backbone and left behind afterwards.
"""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.config.section import MethodConfig
from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput, width_of
from tico_ssl.methods._embeddings import at_least_float32
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError


def supervised_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """-mean log softmax(logits)[label] of logits (n, classes) and labels (n,) of any integer type.

    Label smoothing s: the target is 1 - s for the label, plus s / classes for every class.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"supervised: logits must be (batch, classes) and labels (batch,), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(at_least_float32(logits), labels.long(), label_smoothing=smoothing)


class Config(MethodConfig):
    """The classifier's settings; the defaults are those of standard ImageNet training."""

    minimum_views: ClassVar[int] = 1

    name: str = "supervised"
    """Training with labels."""
    classes: Annotated[int, Field(ge=2)] = 1000
    """Number of classes; labels are 0 to classes - 1."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""


class Supervised(Method):
    """Backbone and linear classifier. Only the first view is used.

    The loss does not indicate collapse, which labels prevent: a high loss means only that classes are hard to separate.
    """

    config: Config

    def __init__(self, backbone: nn.Module, width: int | None = None, config: Config | None = None) -> None:
        super().__init__(backbone)
        self.config = config = config or Config()
        self.classifier = nn.Linear(width_of(backbone, width), config.classes)

    def check_data(self, images: int, labels: Tensor | None) -> None:
        """One label per image, below the number of classes."""
        labels = _one_for_each_image(labels)
        classes, least, most = self.config.classes, int(labels.min()), int(labels.max())
        if least < 0 or most >= classes:
            raise UserError(
                f"labels range from {least} to {most}, but method.classes {classes} allows 0 to {classes - 1}"
            )

    def encode(self, batch: Batch, fixed: bool = True) -> Encoded:
        """Logits of the first view, and the labels."""
        label = _one_for_each_image(batch.label)
        (view,) = batch.images(1)
        return Encoded((self.classifier(self.embed(view)),), (label,) if fixed else ())

    def loss(self, encoded: Encoded) -> StepOutput:
        """Cross entropy and accuracy."""
        (logits,), (label,) = encoded.trained, encoded.fixed
        loss = supervised_loss(logits, label, self.config.smoothing)
        accuracy = (logits.detach().argmax(dim=1) == label).float().mean()
        return StepOutput(loss, {"accuracy": accuracy}, logits.detach())


def _one_for_each_image(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise UserError("method supervised needs labels, but these images have none")
    if labels.ndim != 1:
        raise UserError(f"method supervised needs one label per image, got labels of shape {list(labels.shape[1:])}")
    return labels


def build(config: Config, backbone: Backbone) -> Supervised:
    """Supervised training of a recipe."""
    return Supervised(backbone, config=config)
