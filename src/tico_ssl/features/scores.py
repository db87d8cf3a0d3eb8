"""Scores of classifiers: accuracy in per cent, and average precision."""

import numpy as np
from torch import Tensor

from tico_ssl.results.record import Numbers


def top_accuracies(scores: Tensor, labels: Tensor) -> Numbers:
    """Per cent of images whose class has the highest score (top1), or is among the five highest (top5)."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels.to(scores.device)[:, None]
    return {
        "top1": 100 * float(best[:, 0].double().mean()),
        "top5": 100 * float(best.any(dim=1).double().mean()),
    }


def average_precision(scores: np.ndarray, present: np.ndarray) -> float:
    """Area under the precision-recall curve with interpolated (monotonically decreasing) precision, at all recalls.

    This is VOC's measure from 2010 on, not the mean at 11 recalls. Images with equal scores count as one step, so
    their order does not matter.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.asarray(present, dtype=np.float64)[order]
    if hits.sum() == 0:
        return float("nan")
    last_of_ties = np.append(np.diff(scores[order]) != 0, True)
    found = hits.cumsum()[last_of_ties]
    seen = np.arange(1, len(hits) + 1)[last_of_ties]
    precision = np.maximum.accumulate((found / seen)[::-1])[::-1]
    recall = found / hits.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))
