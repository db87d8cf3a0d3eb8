"""Alignment and uniformity on the unit sphere (Wang and Isola, 2020)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1_024


def alignment(one: Tensor, other: Tensor) -> float:
    """Mean squared distance of two views of the same image, both of length one: 0 together, 2 unrelated, 4 opposed."""
    return float((F.normalize(one.double(), dim=1) - F.normalize(other.double(), dim=1)).square().sum(dim=1).mean())


def uniformity(features: Tensor, t: float = 2.0) -> float:
    """log of the mean of exp(-t distance²) over all pairs of different images, of length one: 0 in a point, about
    -2 t when there is room for all. A piece of the matrix of pairs at a time."""
    z = F.normalize(features.double(), dim=1)
    n = len(z)
    total = sum(float(torch.exp(-t * (2 - 2 * part @ z.T).clamp_min(0)).sum()) for part in z.split(CHUNK))
    return math.log(max((total - n) / (n * (n - 1)), 1e-300))  # each image's distance to itself has counted as 1
