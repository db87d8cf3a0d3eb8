"""Images of any number of channels as the network needs them."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tico_ssl.data.depth import native

LUMA = (0.299, 0.587, 0.114)  # Pillow's weights of red, green and blue
WITH_ALPHA = {1: 2, 3: 4}  # channels of grey and colour images that have transparency


def of_picture(image: Image.Image, channels: int) -> Tensor:
    """A Pillow image with its values as they are. To one or three channels, anything can be converted; other numbers
    an image has to have."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return of_array(np.array(image)[..., None], channels)
    if channels not in (1, 3):
        return of_array(np.atleast_3d(np.array(_unpacked(image))), channels)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "RGB" if channels == 3 else "L"
    return of_array(np.atleast_3d(np.array(image if image.mode == mode else image.convert(mode))), channels)


def _unpacked(image: Image.Image) -> Image.Image:
    """An image in a mode that has a band for every channel."""
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        return image
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGBA" if image.mode in ("PA", "RGBa", "La") or "transparency" in image.info else "RGB")


def of_array(array: np.ndarray, channels: int) -> Tensor:
    """Values (height, width, channels) as (channels, height, width), with the network's number of channels."""
    array, found = native(array), array.shape[-1]
    if found != channels and channels in (1, 3):
        if found in WITH_ALPHA.values():
            array, found = _on_white(array), found - 1
        if found == 1:
            array = array.repeat(channels, axis=-1)
        elif found == 3 and channels == 1:
            array = _luma(array)
    if array.shape[-1] != channels:
        raise ValueError(f"has {found} channels, while backbone.channels is {channels}")
    if 0 in array.shape:
        raise ValueError(f"an array of shape {array.shape}")
    return torch.from_numpy(array).permute(2, 0, 1)


def of_stack(array: np.ndarray, channels: int) -> Tensor:
    """The same for an array whose channels are first, last or absent."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise ValueError(f"shape {array.shape} is not that of an image")
    usual = {channels, 1, 3} if channels in (1, 3) else {channels}
    if array.shape[0] == channels or (array.shape[0] in usual and array.shape[-1] not in usual):
        array = array.transpose(1, 2, 0)
    elif array.shape[-1] not in usual:
        raise ValueError(f"shape {array.shape} has no first or last axis of {channels} channels")
    return of_array(np.ascontiguousarray(array), channels)


def _on_white(array: np.ndarray) -> np.ndarray:
    """Transparency, the last channel, laid on white."""
    white = np.iinfo(array.dtype).max if array.dtype.kind in "ui" else 1.0
    alpha = array[..., -1:].astype(np.float64) / white
    mixed: np.ndarray = array[..., :-1] * alpha + white * (1 - alpha)
    return (mixed.round() if array.dtype.kind in "ui" else mixed).astype(array.dtype)


def _luma(array: np.ndarray) -> np.ndarray:
    grey: np.ndarray = array.astype(np.float64) @ np.array(LUMA)
    return (grey.round() if array.dtype.kind in "ui" else grey).astype(array.dtype)[..., None]
