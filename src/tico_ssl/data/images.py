"""Images as people have them: paths, Pillow images, arrays and tensors, one or many."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tico_ssl.config.sections import Limits
from tico_ssl.data import bands
from tico_ssl.data.decoding import Reading, values
from tico_ssl.data.depth import eight_bits, native, to_bytes
from tico_ssl.runtime.errors import UserError

OVERSHOOT = 0.5  # beyond 0 and 1, which floats may reach that were resized by bicubic interpolation

ImageLike = Tensor | np.ndarray | Image.Image | str | Path
"""One image, or a batch of them as one tensor (N, C, H, W) or array (N, H, W, C)."""


def as_images(
    given: ImageLike | Iterable[ImageLike], channels: int, limits: Limits | None = None
) -> Tensor | list[Tensor]:
    """A batch (N, C, H, W) as it is, or a list of images (C, H, W) of any sizes. Tensors have their channels first and
    arrays last, unless only the other way has the right number of them; what has more than eight bits is mapped to
    bytes by `limits`, or by its own range if there are none. Without limits, float tensors are from 0 to 1."""
    if isinstance(given, Tensor) and given.ndim == 4 and given.shape[1] == channels and given.numel():
        return _pixels(_plain(given), limits)
    batch = isinstance(given, Tensor | np.ndarray) and given.ndim == 4
    several = batch or (isinstance(given, Iterable) and not isinstance(given, ImageLike))
    items: Any = given if several else [given]
    images = [_one(image, channels, limits) for image in items]
    if not images:
        raise UserError("no images are given")
    return images


def _one(image: Any, channels: int, limits: Limits | None) -> Tensor:
    if isinstance(image, str | Path):
        reading = Reading(channels, windowed=limits is None)
        return to_bytes(values(Path(image).expanduser(), reading), limits)
    try:
        if isinstance(image, Image.Image):
            return to_bytes(bands.of_picture(ImageOps.exif_transpose(image), channels), limits)
        if isinstance(image, np.ndarray):
            array = native(image if image.ndim == 3 else image[..., None])
            last = array.shape[-1] in (channels, 1)
            if limits is None or array.dtype == np.uint8:
                return _with_channels(torch.from_numpy(eight_bits(array).copy()), channels, last)
            return to_bytes(_with_channels(torch.from_numpy(array.copy()), channels, last), limits)
    except ValueError as error:
        raise UserError(f"an image cannot be used: {error}") from error
    if isinstance(image, Tensor):
        tensor = _plain(image) if image.ndim == 3 else _plain(image)[None]
        return _pixels(_with_channels(tensor, channels, last=tensor.shape[0] not in (channels, 1)), limits)
    raise UserError(f"an image is a path, a Pillow image, an array or a tensor, not {type(image).__name__}")


def _plain(tensor: Tensor) -> Tensor:
    """A dense tensor of numbers."""
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.layout != torch.strided:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise UserError(f"a tensor of {kind}: bytes, or floats from 0 to 1, are needed")
    return tensor


def _pixels(tensor: Tensor, limits: Limits | None) -> Tensor:
    """Bytes, or floats from 0 to 1."""
    if tensor.dtype == torch.uint8:
        return tensor
    if not tensor.is_floating_point():
        return to_bytes(tensor.cpu(), limits).to(tensor.device)
    if limits is not None:
        return to_bytes(tensor.detach().float().cpu(), limits).to(tensor.device)
    low, high = (float(end) for end in tensor.detach().aminmax())
    if not (low >= -OVERSHOOT and high <= 1 + OVERSHOOT):  # also NaN
        raise UserError(
            f"a float tensor with values from {low:.4g} to {high:.4g}: pixels are floats from 0 to 1, or uint8 from 0 "
            "to 255, and not normalised yet"
        )
    return tensor.float()


def _with_channels(image: Tensor, channels: int, last: bool) -> Tensor:
    """An image (C, H, W) of the right number of channels; grey ones are repeated."""
    first = image.permute(2, 0, 1) if last and image.ndim == 3 else image
    if first.ndim != 3 or first.shape[0] not in (channels, 1) or 0 in first.shape:
        raise UserError(f"an image of shape {tuple(image.shape)}: {channels} channels are needed, first or last")
    return first.expand(channels, -1, -1)
