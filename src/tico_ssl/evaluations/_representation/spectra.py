"""Effective dimensions of features, from the spectrum of their covariance; all in float64."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tico_ssl.data.source import spread_evenly

EPSILON = 1e-7  # RankMe's: added to every share
ROUNDING = 1e-12  # of the mean squared length: a variance below it is rounding error of the network, and counts as zero
FLOOR = 1e-10  # of the largest eigenvalue: below it is rounding error of float32 features


def some_of(features: Tensor, most: int) -> Tensor:
    """At most so many of the features, spread evenly: a spectrum of the first would be one of the first classes."""
    return features[spread_evenly(len(features), most)]


def eigenvalues(features: Tensor, centred: bool = True) -> Tensor:
    """Eigenvalues of the covariance of features (n, d), or of their second moment; descending, min(n, d) of them.

    From the smaller of the (d, d) and the (n, n) matrix, which have the same non-zero eigenvalues.
    """
    values = features.double()
    least = 0.0
    if centred:
        least = ROUNDING * float(values.square().sum(dim=1).mean())
        values = values - values.mean(dim=0)
    product = values.T @ values if len(values) > values.shape[1] else values @ values.T
    found = torch.linalg.eigvalsh(product).flip(0).clamp_min(0) / len(values)
    return torch.where(found > least, found, 0)


def entropy_rank(amounts: Tensor, epsilon: float = EPSILON) -> float:
    """exp of the entropy of amounts as shares of their sum: the number of equal ones with the same entropy."""
    shares = amounts / amounts.sum().clamp_min(1e-300) + epsilon
    return float(torch.exp(-(shares * shares.log()).sum()))


def rankme(features: Tensor, epsilon: float = EPSILON) -> float:
    """RankMe: entropy rank of the singular values, without centring. 1 for a point, the width for an even spread."""
    return entropy_rank(eigenvalues(features, centred=False).sqrt(), epsilon)


def participation_ratio(spectrum: Tensor) -> float:
    """Squared sum over sum of squares: an effective dimension that weights large eigenvalues more."""
    spectrum = spectrum.double()
    return float(spectrum.sum().square() / spectrum.square().sum().clamp_min(1e-300))


class PowerLaw(NamedTuple):
    """eigenvalue = constant / index ** alpha, the range of the fit, and its R²."""

    alpha: float
    r2: float
    first: int
    last: int


def usable(spectrum: Tensor) -> int:
    """Number of eigenvalues above rounding error."""
    return int((spectrum > FLOOR * spectrum[0]).sum()) if float(spectrum[0]) > 0 else 0


def power_law(spectrum: Tensor, first: int, last: int) -> PowerLaw:
    """Least squares of log eigenvalue on log index, for the indices `first` to `last`, counted from 1."""
    x = torch.arange(first, last + 1, dtype=torch.float64).log()
    y = spectrum[first - 1 : last].double().log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    total = y @ y
    explained = slope**2 * (x @ x) / total if float(total) > 0 else torch.ones(())
    return PowerLaw(-float(slope), float(explained), first, last)


def lidar(views: Tensor, delta: float = 1e-4, epsilon: float = 1e-8) -> float:
    """LiDAR of views (images, views per image, d): entropy rank of the linear discriminants between images.

    Between: the covariance of the images' means. Within: the mean covariance of an image's views, plus delta on the
    diagonal. The generalised eigenvalues use the Cholesky factor of the second.
    """
    views = views.double()
    images, each, width = views.shape
    means = views.mean(dim=1)
    centred = means - means.mean(dim=0)
    between = centred.T @ centred / (images - 1)
    spread = (views - means.unsqueeze(1)).flatten(0, 1)
    within = spread.T @ spread / (images * (each - 1)) + delta * torch.eye(width, dtype=torch.float64)
    factor = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(factor, between, upper=False)
    quotient = torch.linalg.solve_triangular(factor, half.T, upper=False)
    found = torch.linalg.eigvalsh((quotient + quotient.T) / 2)
    least = ROUNDING * float(views.square().sum(dim=2).mean()) / delta  # the most that rounding error can add up to
    return entropy_rank(torch.where(found > least, found, 0), epsilon)


def thinned(spectrum: Tensor, points: int = 48) -> dict[str, list[int] | list[float]]:
    """A spectrum for a plot with logarithmic axes: indices from 1, evenly spaced on that axis, and the shares of the
    total variance of these eigenvalues."""
    count = len(spectrum)
    places = sorted({round(math.exp(math.log(count) * i / max(1, points - 1))) for i in range(points)})
    shares = spectrum / spectrum.sum().clamp_min(1e-300)
    return {"index": places, "share": [float(f"{float(shares[i - 1]):.4g}") for i in places]}
