"""Scores of classifiers: accuracy in per cent, and average precision."""

import numpy as np
from torch import Tensor

from tico_ssl.features.evidence import Scores, accuracies


def top_accuracies(scores: Tensor, labels: Tensor) -> Scores:
    """Per cent of images whose class has the highest score (top1), or is among the five highest (top5)."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels.to(scores.device)[:, None]
    return accuracies({"top1": best[:, 0], "top5": best.any(dim=1)})


def average_precision(scores: np.ndarray, present: np.ndarray) -> float:
    """Area under the precision-recall curve with interpolated (monotonically decreasing) precision, at all recalls.

    This is VOC's measure from 2010 on, not the mean at 11 recalls. Images with equal scores count as one step, so
    their order does not matter.
    """
    return float(average_precisions(scores, present, np.ones((1, len(scores))))[0])


def average_precisions(scores: np.ndarray, present: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same for images that count several times or not at all, (resamples, images); nan without a present one.

    Only steps with a present image matter: between two of them precision falls, so that it is no maximum.
    """
    if not present.any():
        return np.full(len(counts), np.nan)
    order = np.argsort(-scores, kind="stable")
    hits = np.asarray(present, dtype=bool)[order]
    last_of_ties = np.append(np.diff(scores[order]) != 0, True)
    step = np.append(0, last_of_ties.cumsum()[:-1])
    steps, first = np.unique(step[hits], return_index=True)
    ends = last_of_ties.nonzero()[0][steps]
    seen = np.add.reduceat(counts[:, order[: ends[-1] + 1]], np.append(0, ends[:-1] + 1), axis=1).cumsum(axis=1)
    found = np.add.reduceat(counts[:, order[hits]], first, axis=1).cumsum(axis=1, dtype=np.float64)
    precision = np.maximum.accumulate((found / np.maximum(seen, 1))[:, ::-1], axis=1)[:, ::-1]
    area = (np.diff(found, axis=1, prepend=0.0) * precision).sum(axis=1)
    total = found[:, -1]
    precisions: np.ndarray = np.divide(area, total, out=np.full(len(counts), np.nan), where=total > 0)
    return precisions
