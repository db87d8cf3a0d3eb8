"""Values of more than eight bits, and the one linear map by which they become the bytes that everything else handles.

A range [low, high] becomes 0 to 255: round(255 (v - low) / (high - low)), clipped. Within the range, the error is at
most half a level, 1/510 of the range. Images of eight bits are used as they are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import Limits
from tico_ssl.runtime.wording import counted

PIECE = 1 << 24  # values that are mapped at once: the floats in between take eight times the memory of the bytes


class Scaling(NamedTuple):
    """What becomes 0 to 255, of which kind of values, and from how many images it was found (0: it was given)."""

    limits: Limits
    kind: str
    images: int = 0

    def line(self) -> str:
        """In words."""
        pairs = [f"{low:,.6g} to {high:,.6g}" for low, high in np.reshape(self.limits, (-1, 2)).tolist()]
        how = f"the percentiles 0.5 and 99.5 of {counted(self.images, 'image')}; " if self.images else ""
        each = "channel by channel " if len(pairs) > 1 else ""
        return f"{self.kind} images: {each}{', '.join(pairs)} becomes 0 to 255 ({how}data.range)"


def kind_of(dtype: torch.dtype) -> str:
    """Values in words: 16-bit, 32-bit float."""
    return f"{dtype.itemsize * 8}-bit{' float' if dtype.is_floating_point else ''}"


def native(array: np.ndarray) -> np.ndarray:
    """Numbers in this machine's byte order; booleans as black and white."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind not in "uif" or array.dtype.itemsize > 8:
        raise ValueError(f"values of type {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def eight_bits(array: np.ndarray) -> np.ndarray:
    """Values scaled to eight bits by their dtype and range, where no range is known: 0..1, 0..255, 0..65535, or 0 to
    the maximum. Integers of 64 bits are bytes if they fit."""
    if array.dtype == np.uint8:
        return array
    pieces = list(_pieces(array.shape))
    largest = max((float(np.max(_positive(array[piece]), initial=0)) for piece in pieces), default=0.0)
    if np.issubdtype(array.dtype, np.floating):
        full = 1.0 if largest <= 1 else 255.0 if largest <= 255 else largest
    else:
        wide = array.dtype.itemsize == 8 and largest <= 255  # what numpy and torch make of plain integers
        full = 255.0 if wide else 65535.0 if largest <= 65535 else largest
    mapped = np.empty_like(array, dtype=np.uint8)
    for piece in pieces:
        mapped[piece] = (_positive(array[piece]) * (255 / full)).round()
    return mapped


def _positive(values: np.ndarray) -> np.ndarray:
    """Without NaN and what is below 0, in float64."""
    values = np.nan_to_num(values.astype(np.float64), copy=False)
    return values.clip(0, out=values)


def to_bytes(image: Tensor, limits: Limits | None) -> Tensor:
    """An image (C, H, W), or several of one size (N, C, H, W), as uint8. Bytes stay as they are."""
    if image.dtype == torch.uint8:
        return image
    array = native(image.numpy())
    if limits is None:
        return torch.from_numpy(eight_bits(array))
    mapped = np.empty_like(array, dtype=np.uint8)  # in the same memory order
    for part in _pieces(array.shape):
        mapped[part] = _mapped(array[part], limits)
    return torch.from_numpy(mapped)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Parts of an array along its rows, or along its images if it has several."""
    axis = 0 if len(shape) > 3 else 1
    step = max(1, PIECE * shape[axis] // max(1, int(np.prod(shape))))
    for first in range(0, shape[axis], step):
        yield (slice(None),) * axis + (slice(first, first + step),)


def _mapped(values: np.ndarray, limits: Limits) -> np.ndarray:
    """Float32 holds every value of 16 bits exactly."""
    pairs = np.reshape(limits, (-1, 2)).astype(np.float64)
    wide = np.float32 if values.dtype.itemsize <= 2 else np.float64
    low, factor = pairs[:, 0, None, None], 255 / (pairs[:, 1] - pairs[:, 0])[:, None, None]
    levels: np.ndarray = (values.astype(wide) - low.astype(wide)) * factor.astype(wide)
    np.nan_to_num(levels, copy=False, nan=0, posinf=255, neginf=0)
    levels.clip(0, 255, out=levels)
    return levels.round(out=levels)
