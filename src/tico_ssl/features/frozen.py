"""The training and the test images as a frozen backbone sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.cache import FeatureCache
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError


@dataclass(frozen=True)
class Features:
    """What a frozen representation makes of the training and the test images.

    Labels are one class an image (N), or several (N, classes): 1 there, -1 not, 0 hard to say.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    def labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The class of every image, or a line that says what is missing."""
        train, test = self.raw_labels(wanted_by)
        if train.ndim != 1 or test.ndim != 1:
            raise UserError(f"{wanted_by} needs one class an image; these images have several")
        return train, test

    def raw_labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The labels, be it one an image or several, or a line that says that there are none."""
        if self.train_labels is None or self.test_labels is None:
            raise UserError(f"{wanted_by} needs labels: class folders, or a data set that has them (see --data)")
        return self.train_labels, self.test_labels


def frozen_features(
    backbone: Backbone,
    train: Source,
    test: Source,
    device: torch.device,
    cache: FeatureCache | None = None,
    whole: bool = False,
) -> Features:
    """Both splits through a frozen backbone; images that cannot be read are left out with their labels."""
    cache = cache or FeatureCache(None)
    ours = cache.extract(backbone, train, device, "features", whole)
    theirs = cache.extract(backbone, test, device, None, whole)
    return Features(
        ours.features,
        theirs.features,
        None if train.labels is None else train.labels[ours.places],
        None if test.labels is None else test.labels[theirs.places],
    )
