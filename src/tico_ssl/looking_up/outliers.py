"""Outliers: images whose nearest neighbours are far away."""

import torch
from torch import Tensor

from tico_ssl.features.neighbours import nearest

IQRS = 1.5  # of Tukey's fence


def neighbour_cosines(rows: Tensor, k: int, device: torch.device, at_once: int) -> Tensor:
    """The cosines of each unit row to its k nearest others (n, k), nearest first, exact. Neighbours of `at_once` rows
    are looked for in one pass over all, which bounds what is held beside the rows themselves."""
    found = [
        nearest(rows, part, k, left_out=places, device=device, label="neighbours").cosines.cpu()
        for part, places in zip(rows.split(at_once), torch.arange(len(rows)).split(at_once), strict=True)
    ]
    return torch.cat(found)


def fence(scores: Tensor) -> float:
    """Tukey's upper fence of the scores' logarithms: upper quartile + 1.5 times the distance of the quartiles."""
    logs = scores.double().clamp_min(1e-6).log()
    lower, upper = logs.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return float((upper + IQRS * (upper - lower)).exp())
