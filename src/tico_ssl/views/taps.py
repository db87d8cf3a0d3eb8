"""The weights with which torch resizes eight-bit images on a CPU, in integers.

torch resamples uint8 images, antialiased, first their columns and then their rows; each output pixel is a sum of input
pixels with 16-bit weights, rounded to eight bits. The weights depend only on the number of pixels before and after, so
a table of them gives the same bits on any device.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.views import Interpolation

REACH: dict[Interpolation, int] = {"bilinear": 1, "bicubic": 2}  # of a kernel, in pixels
MOST_BITS = 22  # of precision, as in torch
LARGEST = 1 << 15  # weights are below


class Taps(NamedTuple):
    """Weights of resizing `extent` pixels: output pixel i is the sum of weights[i, k] * input[first[i] + k], shifted by
    `bits` to the right."""

    first: np.ndarray
    weights: np.ndarray
    bits: int


def taps(extent: int, size: int, interpolation: Interpolation) -> Taps:
    """The weights that torch has for `extent` pixels resized to `size`, in the same arithmetic."""
    scale = extent / size
    stretch = max(scale, 1.0)
    support = REACH[interpolation] * stretch
    most = 2 * math.ceil(support) + 1
    centre = scale * (np.arange(size) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.clip(np.minimum((centre + support + 0.5).astype(np.int64), extent) - first, 0, most)
    k = np.arange(most)
    weights = _kernel((k + first[:, None] - centre[:, None] + 0.5) * (1 / stretch), interpolation)
    weights = np.where(k < count[:, None], weights, 0.0)
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]  # in order, as torch adds them
    bits = 0
    while bits < MOST_BITS and int(0.5 + weights.max() * (1 << (bits + 1))) < LARGEST:
        bits += 1
    scaled = weights * (1 << bits)
    return Taps(first, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int16), bits)


def _kernel(distance: np.ndarray, interpolation: Interpolation) -> np.ndarray:
    x: np.ndarray = np.abs(distance)
    if interpolation == "bilinear":
        triangle: np.ndarray = np.maximum(1 - x, 0.0)
        return triangle
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


class TapTable(NamedTuple):
    """The taps of all extents up to a largest one, in a few tensors. Row e of `about` is about extent e: where its
    entries start in `first` and in `weights`, the number of weights of an output pixel, and the bits."""

    about: Tensor
    first: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "TapTable":
        """The table on a device."""
        return TapTable(*(part.to(device) for part in self))


def tap_table(largest: int, size: int, interpolation: Interpolation) -> TapTable:
    """The taps of extents 1 to `largest`, resized to `size`."""
    found = [taps(extent, size, interpolation) for extent in range(1, largest + 1)]
    counts = np.array([0, *(one.weights.shape[1] for one in found)])
    begins = np.concatenate([[0, 0], np.cumsum(counts[1:] * size)[:-1]])
    firsts = np.maximum(np.arange(largest + 1) - 1, 0) * size
    about = np.stack([firsts, begins, counts, [0, *(one.bits for one in found)]], axis=1)
    return TapTable(
        torch.from_numpy(about.astype(np.int32)),
        torch.from_numpy(np.concatenate([one.first for one in found]).astype(np.int32)),
        torch.from_numpy(np.concatenate([one.weights.flatten() for one in found])),
    )
