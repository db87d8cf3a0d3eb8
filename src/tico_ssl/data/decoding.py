"""From a file or its bytes to pixels, in one place.

Whatever the file holds comes out as uint8 with the channels that the network wants: upright as EXIF says, transparency
laid on white, CMYK and palettes as RGB, 16-bit, 32-bit and float values scaled to eight bits. Files with other numbers
of channels are .npy arrays or, with tifffile installed, multi-band TIFFs.
"""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tico_ssl.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"}
ARRAY_SUFFIX = ".npy"
MOST_PIXELS = 200_000_000  # of one image; what claims more is a mistake or an attack


class BadImage(UserError):
    """A file that cannot be used as an image, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: not a readable image ({reason})")
        self.name, self.reason = name, reason


def decode(source: Path | bytes, channels: int = 3, name: str | None = None, shorter: int | None = None) -> Tensor:
    """An image as uint8 (channels, height, width). `shorter` allows a JPEG to be decoded at a reduced scale, as long as
    its shorter side keeps that many pixels."""
    name = name or (str(source) if isinstance(source, Path) else "image")
    try:
        if channels not in (1, 3) or name.endswith(ARRAY_SUFFIX):
            return _many_channels(source, channels, name)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadImage(name, f"{width} x {height} pixels")
            if shorter is not None and image.format == "JPEG":
                image.draft(None, _reduced(width, height, shorter))
            return pixels(ImageOps.exif_transpose(image), channels)
    except BadImage:
        raise
    except Exception as error:  # decoders fail in many ways, and none of them is worth a traceback
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadImage(name, "empty file" if _is_empty(source) else reason) from error


def pixels(image: Image.Image, channels: int = 3) -> Tensor:
    """A Pillow image as uint8 (channels, height, width)."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))  # which Pillow would clip, not scale
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque)
    array = np.array(image.convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(array if channels == 3 else array[..., None]).permute(2, 0, 1).contiguous()


def _reduced(width: int, height: int, shorter: int) -> tuple[int, int]:
    """The size to ask a JPEG decoder for: it answers with the next larger one of 1/1, 1/2, 1/4 and 1/8."""
    scale = min(1.0, shorter / min(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _eight_bits(array: np.ndarray) -> np.ndarray:
    """Values scaled by what their type and range say: 0..1, 0..255, 0..65535, or 0 to the largest."""
    if array.dtype == np.uint8:
        return array
    values = np.nan_to_num(array.astype(np.float64)).clip(0)
    largest = float(values.max(initial=0))
    if np.issubdtype(array.dtype, np.floating):
        full = 1.0 if largest <= 1 else 255.0 if largest <= 255 else largest
    else:
        full = 65535.0 if largest <= 65535 else largest
    return (values * (255 / full)).round().astype(np.uint8)


def _many_channels(source: Path | bytes, channels: int, name: str) -> Tensor:
    """A .npy array or a multi-band TIFF, channels first or last."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    if name.endswith(ARRAY_SUFFIX):
        array = np.load(stream, allow_pickle=False)
    elif name.lower().endswith((".tif", ".tiff")):
        array = _read_tiff(stream, name)
    else:
        raise BadImage(name, f"{channels} channels are read from .npy and .tif files")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or channels not in (array.shape[0], array.shape[-1]):
        raise BadImage(name, f"shape {array.shape} has no axis of {channels} channels at its ends")
    if array.shape[0] != channels:
        array = array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(_eight_bits(array)))


def _read_tiff(stream: Path | io.BytesIO, name: str) -> np.ndarray:
    try:
        import tifffile
    except ImportError as error:
        raise BadImage(name, "TIFFs of many bands need tifffile: pip install 'tico-ssl[tiff]'") from error
    return tifffile.imread(stream)


def _is_empty(source: Path | bytes) -> bool:
    return not source if isinstance(source, bytes) else source.is_file() and source.stat().st_size == 0
