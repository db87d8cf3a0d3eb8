"""The deterministic view of evaluations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.views import operations

KEPT = 224 / 256  # fraction of the shorter side: resize to 256, then centre-crop 224


def centre_crop(images: Tensor | Sequence[Tensor], size: int) -> Tensor:
    """The central square of every image, resized (antialiased bicubic). A batch of the right size is kept whole."""
    if isinstance(images, Tensor) and images.shape[-2:] == (size, size):
        return images.float() / 255 if images.dtype == torch.uint8 else images
    shapes = torch.tensor([image.shape[-2:] for image in images])
    exact = (shapes == size).all(dim=1)
    side = torch.where(exact, size, (shapes.amin(dim=1) * KEPT).round().clamp_min(1))
    top, left = (((shapes[:, axis] - side) / 2).floor() for axis in (0, 1))
    box = (top, left, side, side, torch.zeros(len(images), dtype=torch.bool))
    top, left, height, width, flip = (values.to(images[0].device) for values in box)
    return operations.resized_crop(images, top, left, height, width, flip, size)
