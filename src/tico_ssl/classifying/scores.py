"""How good a classifier is on labelled images, class by class."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tico_ssl.classifying.model import ImageClassifier
from tico_ssl.data.source import Source
from tico_ssl.features.evidence import accuracies, resampled
from tico_ssl.features.extraction import image_batches
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.wording import counted

MOST_CLASSES = 1_000  # of a confusion matrix in results.json


@dataclass(frozen=True)
class Verdicts:
    """The class that each readable test image has (truth) and is given (named), and the probability of the latter."""

    truth: Tensor
    named: Tensor
    probability: Tensor
    among_five: Tensor
    places: Tensor
    """Indices of the images in their source."""
    classes: int

    @property
    def confusion(self) -> Tensor:
        """Images by true class (row) and named class (column)."""
        return torch.bincount(self.truth * self.classes + self.named, minlength=self.classes**2).view(-1, self.classes)

    def mistakes(self, most: int) -> Tensor:
        """Positions of wrongly named images, the most confident first."""
        wrong = (self.truth != self.named).nonzero().ravel()
        return wrong[self.probability[wrong].argsort(descending=True, stable=True)[:most]]


def probability_batches(
    model: ImageClassifier, source: Source, device: torch.device, label: str | None
) -> Iterator[tuple[Tensor, list[int]]]:
    """Probabilities of all readable images, batch by batch, and their indices in the source."""
    batches = image_batches(source, model.backbone, device)
    for images, places in track(batches, len(source), label, "images", lambda batch: len(batch[1])):
        yield model.probabilities(images), places


def judged(model: ImageClassifier, source: Source, device: torch.device) -> Verdicts:
    """What a classifier says of labelled images."""
    assert source.labels is not None
    found: list[tuple[Tensor, ...]] = []
    for probabilities, at in probability_batches(model, source, device, "test images"):
        places = torch.tensor(at)
        best = probabilities.topk(min(5, probabilities.shape[1]), dim=1)
        truth = source.labels[places]
        hit = (best.indices == truth[:, None]).any(dim=1)
        found.append((truth, best.indices[:, 0], best.values[:, 0], hit, places))
    if not found:
        raise UserError(f"{source.name}: none of the {counted(len(source), 'image')} can be read")
    truth, named, probability, among_five, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Verdicts(truth, named, probability, among_five, places, len(model.classes))


def scores_of(verdicts: Verdicts, classes: tuple[str, ...], most_frequent: int) -> dict[str, Any]:
    """Accuracy in per cent, also of always naming the most frequent training class; precision and recall by class;
    the confusion matrix; 95 % intervals over test images. What is a share of no images is null."""
    confusion = verdicts.confusion
    right, of_class, as_class = confusion.diag(), confusion.sum(1), confusion.sum(0)
    recalls = [_share(right[i], of_class[i]) for i in range(len(classes))]
    by_class = [
        {"class": name, "images": int(of_class[i]), "named": int(as_class[i])}
        | {"precision": _share(right[i], as_class[i]), "recall": recalls[i]}
        for i, name in enumerate(classes)
    ]
    known = [recall for recall in recalls if recall is not None]
    total = confusion.sum()
    return {
        "accuracy": _share(right.sum(), total),
        "top5": _share(verdicts.among_five.sum(), total),
        "mean_recall": sum(known) / len(known),
        "intervals": _intervals(verdicts, sum(known) / len(known)),
        "images": int(total),
        "most_frequent_class": {
            "class": classes[most_frequent],
            "accuracy": _share(of_class[most_frequent], total),
        },
        "classes": by_class,
        "confusion": confusion.tolist() if len(classes) <= MOST_CLASSES else None,
    }


def _intervals(verdicts: Verdicts, mean_recall: float) -> dict[str, list[float]]:
    """Of the accuracies and of the mean recall, which is a mean over classes: by resampling."""
    truth, right = verdicts.truth.numpy(), (verdicts.truth == verdicts.named).numpy()

    def recall_on(counts: np.ndarray) -> np.ndarray:
        seen = np.stack([np.bincount(truth, of, minlength=verdicts.classes) for of in counts])
        hit = np.stack([np.bincount(truth, of, minlength=verdicts.classes) for of in counts * right])
        recalls: np.ndarray = np.divide(hit, seen, out=np.full(seen.shape, np.nan), where=seen > 0)
        mean: np.ndarray = np.nanmean(recalls, axis=1)
        return 100 * mean

    shares = accuracies({"accuracy": verdicts.truth == verdicts.named, "top5": verdicts.among_five})
    evidence = shares.evidence | {"mean_recall": resampled(mean_recall, recall_on, len(truth))}
    return {name: [round(end, 4) for end in found.interval()] for name, found in evidence.items()}


def _share(part: Tensor, whole: Tensor) -> float | None:
    """Per cent."""
    return 100 * int(part) / int(whole) if whole else None
