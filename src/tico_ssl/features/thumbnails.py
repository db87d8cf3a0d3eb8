"""Small squares of images, for pages and sheets."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.data.bad_files import attempts
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.runtime.device import one_thread

THREADS = 4  # that decode


def smallest_side(sources: Sequence[Source], most: int) -> int:
    """Side of thumbnails in pixels: small images keep their size, since a browser enlarges them just as well."""
    return min([most, *(min(source.images.shape[-2:]) for source in sources if source.images is not None)])


def thumbnails(source: Source, places: Tensor, side: int) -> np.ndarray:
    """The central squares of images (n, side, side, 3); an image that cannot be read is black."""
    if source.images is not None:
        parts = [squares(source.take(part), side) for part in places.split(1024)]
    else:
        small = replace(source, fetch=lambda place: torch.from_numpy(squares(source.fetch(place)[None], side)))
        black = np.zeros((1, side, side, 3), dtype=np.uint8)
        with one_thread():
            found = attempts(small, places.tolist(), THREADS)
            parts = [black if isinstance(one, BadImage) else one.numpy() for one in found]
    return np.concatenate(parts) if parts else np.zeros((0, side, side, 3), dtype=np.uint8)


def squares(images: Tensor, side: int) -> np.ndarray:
    """As (n, side, side, 3) bytes. Of more than three channels the first three; of fewer the first, as grey."""
    images = images if images.is_floating_point() else images / 255
    images = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    height, width = images.shape[-2:]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    images = images[..., top : top + short, left : left + short]
    if short != side:
        images = F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
