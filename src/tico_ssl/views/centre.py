"""The deterministic view of evaluations."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.data.source import Reduced
from tico_ssl.views import operations

KEPT = 224 / 256  # fraction of the shorter side: resize to 256, then centre-crop 224
WHOLE_OFFSET = 16  # in images of a multiple of so many pixels, the central crop begins at a whole one


def needed_side(size: int) -> int:
    """Shorter side, in pixels, at which an image's central crop has the resolution of an input of this size."""
    return math.ceil(size / KEPT)


def packing_side(size: int) -> int:
    """The least side of packed squares whose central crops show what those of the originals do; with sides that are no
    multiple of `WHOLE_OFFSET`, many crops would be off by half a pixel."""
    return math.ceil(needed_side(size) / WHOLE_OFFSET) * WHOLE_OFFSET


def smaller_than_needed(reduced: Reduced | None, size: int) -> str | None:
    """In words, that packing has reduced images to less than an input of this size needs; None if it has not."""
    needed = needed_side(size)
    if reduced is None or reduced.size >= min(needed, reduced.original):
        return None
    return (
        f"reduced from {reduced.original} to {reduced.size} pixels by packing, but a network for {size} needs "
        f"{needed}, of which it takes the central 7/8: numbers are not comparable to those of the originals "
        f"(`tico data pack --size {packing_side(size)}` is enough)"
    )


def centre_crop(images: Tensor | Sequence[Tensor], size: int) -> Tensor:
    """The central square of every image, resized (antialiased bicubic). A batch of the right size is kept whole."""
    if isinstance(images, Tensor) and images.shape[-2:] == (size, size):
        return images.float() if images.is_floating_point() else images.float() / 255
    shapes = torch.tensor([image.shape[-2:] for image in images])
    exact = (shapes == size).all(dim=1)
    side = torch.where(exact, size, (shapes.amin(dim=1) * KEPT).round().clamp_min(1))
    top, left = (((shapes[:, axis] - side) / 2).floor() for axis in (0, 1))
    box = (top, left, side, side, torch.zeros(len(images), dtype=torch.bool))
    top, left, height, width, flip = (values.to(images[0].device) for values in box)
    return operations.resized_crop(images, top, left, height, width, flip, size)
