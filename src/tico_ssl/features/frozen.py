"""Training and test features of a frozen backbone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.cache import FeatureCache
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError


@dataclass(frozen=True)
class Features:
    """Features of the training and the test images under one representation.

    Labels are one class per image (N), or several (N, classes): 1 present, -1 absent, 0 difficult.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    def labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The class of every training and test image; a UserError where there is none."""
        train, test = self.raw_labels(wanted_by)
        if train.ndim != 1 or test.ndim != 1:
            raise UserError(f"{wanted_by} needs one class per image; these images have several")
        return train, test

    def raw_labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The labels, one or several per image; a UserError where there are none."""
        if self.train_labels is None or self.test_labels is None:
            raise UserError(f"{wanted_by} needs labels: class folders, or a data set with labels (see --data)")
        return self.train_labels, self.test_labels


def frozen_features(
    backbone: Backbone,
    train: Source,
    test: Source,
    device: torch.device,
    cache: FeatureCache | None = None,
    whole: bool = False,
) -> Features:
    """Features of both splits; images that cannot be read are left out with their labels."""
    cache = cache or FeatureCache(None)
    ours = cache.extract(backbone, train, device, "features", whole)
    theirs = cache.extract(backbone, test, device, None, whole)
    return Features(
        ours.features,
        theirs.features,
        None if train.labels is None else train.labels[ours.places],
        None if test.labels is None else test.labels[theirs.places],
    )
