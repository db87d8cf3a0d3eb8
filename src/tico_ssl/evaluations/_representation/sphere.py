"""Alignment and uniformity on the unit sphere (Wang and Isola, 2020)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1_024


def alignment(one: Tensor, other: Tensor) -> float:
    """Mean squared distance of two views of the same image at unit length: 0 identical, 2 unrelated, 4 opposite."""
    return float(distances(one, other).mean())


def distances(one: Tensor, other: Tensor) -> Tensor:
    """The same of every image."""
    return (F.normalize(one.double(), dim=1) - F.normalize(other.double(), dim=1)).square().sum(dim=1)


def uniformity(features: Tensor, t: float = 2.0) -> float:
    """log of the mean of exp(-t distance²) over all pairs of different images at unit length: 0 at collapse, about -2 t
    when they are spread evenly. Computed in chunks of the pair matrix."""
    z = F.normalize(features.double(), dim=1)
    n = len(z)
    total = sum(float(torch.exp(-t * (2 - 2 * part @ z.T).clamp_min(0)).sum()) for part in z.split(CHUNK))
    return math.log(max((total - n) / (n * (n - 1)), 1e-300))  # without the n pairs of an image with itself
