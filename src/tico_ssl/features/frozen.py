"""Training and test features of frozen backbones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.extraction import Extracted
from tico_ssl.features.lazy import LazyBackbone
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError

Note = Callable[[str, Source, Tensor], None]


@dataclass(frozen=True)
class Features:
    """Features of the training and the test images under one representation.

    Labels are one class per image (N), or several (N, classes): 1 present, -1 absent, and 0 difficult, or absent if
    neither split has a -1.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    @classmethod
    def of(cls, train: Source, of_train: Extracted, test: Source, of_test: Extracted) -> "Features":
        """Extracted features with the labels of the images that could be read."""
        return cls(
            of_train.features,
            of_test.features,
            None if train.labels is None else train.labels[of_train.places],
            None if test.labels is None else test.labels[of_test.places],
        )

    def labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The class of every training and test image; a UserError where there is none."""
        train, test = self.raw_labels(wanted_by)
        if train.ndim != 1 or test.ndim != 1:
            raise UserError(f"{wanted_by} needs one class per image; these images have several")
        return train, test

    def numbered(self) -> tuple[Tensor, Tensor]:
        """The class of every training and test image as one of those of the training images, numbered without gaps:
        -1 in testing for a class without training images."""
        train, test = self.labels()
        present, numbers = train.unique(return_inverse=True)
        if len(present) == 0:
            return numbers, torch.full_like(test, -1)
        places = torch.searchsorted(present, test).clamp_max(len(present) - 1)
        return numbers, torch.where(present[places] == test, places, -1)

    def raw_labels(self, wanted_by: str = "this evaluation") -> tuple[Tensor, Tensor]:
        """The labels, one or several per image; a UserError where there are none. Of several, -1 is always absent."""
        train, test = self.train_labels, self.test_labels
        if train is None or test is None:
            raise UserError(f"{wanted_by} needs labels: class folders, or a data set with labels (see --data)")
        if train.ndim == test.ndim == 2 and not any(bool((labels < 0).any()) for labels in (train, test)):
            train, test = (labels.where(labels > 0, -1) for labels in (train, test))
        return train, test


def frozen_features(
    backbones: Sequence[Backbone | LazyBackbone],
    train: Source,
    test: Source,
    device: torch.device,
    cache: FeatureCache | None = None,
    whole: bool = False,
    label: str | None = "features",
    note: Note = lambda split, source, places: None,
) -> list[Features]:
    """Features of both splits under every backbone, each split decoded once; images that cannot be read are left out
    with their labels. `note` is told which were read."""
    cache = cache or FeatureCache(None)
    ours = cache.extract_all(backbones, train, device, label and f"training {label}", whole)
    theirs = cache.extract_all(backbones, test, device, label and f"test {label}", whole)
    for of_train, of_test in zip(ours, theirs, strict=True):
        note("train", train, of_train.places)
        note("test", test, of_test.places)
    return [Features.of(train, of_train, test, of_test) for of_train, of_test in zip(ours, theirs, strict=True)]
