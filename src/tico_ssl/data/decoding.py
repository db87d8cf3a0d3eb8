"""Decoding: from a file or its bytes to pixels.

Every file becomes uint8 with the network's number of channels: rotated by EXIF orientation, transparency on white,
CMYK and palettes as RGB, 16-bit, 32-bit and float values scaled to eight bits. Files with other numbers of channels are
.npy arrays or, with tifffile installed, multi-band TIFFs.

Plain JPEGs, which most images are, go through torchcodec or torchvision: bitwise-identical to Pillow in half the time
(0.76 against 1.56 ms for 500 x 375 on one core). Pixels keep the memory order of the decoders, channels last, in a
tensor of shape (channels, height, width).
"""

import functools
import io
import math
import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from tico_ssl.data.names import ARRAY_SUFFIX
from tico_ssl.runtime.errors import UserError

JPEG = b"\xff\xd8\xff"
MOST_PIXELS = 1 << 27  # per image, 134 million; a larger claim is a mistake or an attack
# A photograph has far more bytes than one for so many pixels; smaller images may well be of a single colour.
LARGE, PIXELS_PER_BYTE = 1 << 26, 128
MOST_BYTES = 1 << 31  # per file
MOST_SCANS = 500  # of a JPEG, each of which goes over the whole image; usual progressive ones have ten


class BadImage(UserError):
    """An unreadable image, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: not a readable image ({reason})")
        self.name, self.reason = name, reason


class Reading(NamedTuple):
    """How to decode images: the number of channels, and the minimum length of the shorter side, in pixels, for JPEGs
    that may be decoded at 1/2, 1/4 or 1/8 of their size (None: full size)."""

    channels: int = 3
    shorter: int | None = None

    def decode(self, source: Path | bytes, name: str | None = None) -> Tensor:
        """An image as uint8 (channels, height, width)."""
        return decode(source, self.channels, name, self.shorter)

    def pixels(self, image: Image.Image) -> Tensor:
        """The same for a Pillow image; a JPEG that is not loaded yet is decoded here."""
        if self.shorter is not None:
            image.draft(None, (self.shorter, self.shorter))
        return pixels(image, self.channels)


IN_FULL = Reading()


def decode(source: Path | bytes, channels: int = 3, name: str | None = None, shorter: int | None = None) -> Tensor:
    """An image as uint8 (channels, height, width). For `channels` and `shorter` see Reading."""
    name = name or (str(source) if isinstance(source, Path) else "image")
    try:
        if channels not in (1, 3) or name.endswith(ARRAY_SUFFIX):
            return _many_channels(source, channels, name)
        data = source if isinstance(source, bytes) else read_file(source, name)
        if data[:3] == JPEG and data.count(b"\xff\xda") > MOST_SCANS:
            raise BadImage(name, f"a JPEG of more than {MOST_SCANS} scans")
        if channels == 3 and _is_plain_jpeg(data, shorter) and (decode_jpeg := jpeg_decoder()) is not None:
            with suppress(Exception):  # Pillow gives the clearer error
                return decode_jpeg(torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)))
        with Image.open(io.BytesIO(data)) as image:
            _require_size(image.size, len(data), name)
            if shorter is not None:
                image.draft(None, (shorter, shorter))  # affects JPEGs only
            ImageOps.exif_transpose(image, in_place=True)
            return pixels(image, channels)
    except BadImage:
        raise
    except Exception as error:  # decoders fail in many ways
        raise BadImage(name, "empty file" if _is_empty(source) else _reason(error)) from error


def read_file(path: Path, name: str) -> bytes:
    """The content of a regular file: nothing that waits for a writer, never ends or acts when it is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(name, "not a regular file")
            if status.st_size > MOST_BYTES:
                raise BadImage(name, f"{status.st_size:,} bytes")
            return file.read()
    except OSError as error:  # a broken link, no permission
        raise BadImage(name, error.strerror or str(error)) from error


def _require_size(size: tuple[int, ...], bytes: int, name: str, channels: int = 1) -> None:
    """Refuse an image by its header, before memory is taken for it."""
    if not _fits(math.prod(size) // channels, bytes):
        raise BadImage(name, f"{' x '.join(map(str, size))} pixels in {bytes:,} bytes")


def _fits(pixels: int, bytes: int) -> bool:
    return pixels <= MOST_PIXELS and (pixels <= LARGE or pixels <= PIXELS_PER_BYTE * bytes)


def pixels(image: Image.Image, channels: int = 3) -> Tensor:
    """A Pillow image as uint8 (channels, height, width)."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = Image.fromarray(eight_bits(np.asarray(image)))  # Pillow would clip these, not scale them
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "RGB" if channels == 3 else "L"
    array = np.array(image if image.mode == mode else image.convert(mode))
    return torch.from_numpy(array if channels == 3 else array[..., None]).permute(2, 0, 1)


@functools.cache
def jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """The fastest available decoder, from bytes to RGB (3, H, W) with EXIF orientation applied. None: use Pillow."""
    try:
        from torchcodec.decoders import decode_image  # from 0.16 on

        decoder: Callable[[Tensor], Tensor] = decode_image
        return decoder
    except Exception:
        pass
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision")
    return lambda data: decode_jpeg(data, mode=ImageReadMode.RGB, apply_exif_orientation=True)


def _is_plain_jpeg(data: bytes, shorter: int | None) -> bool:
    """Whether bytes are a JPEG of one or three components, of a valid size, to be decoded at full size."""
    if (frame := jpeg_frame(data)) is None:
        return False
    height, width, components = frame
    reducible = shorter is not None and min(height, width) >= 2 * shorter
    return components in (1, 3) and _fits(height * width, len(data)) and not reducible


def jpeg_frame(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and number of components of a JPEG, by its header; None if it is none, or has none."""
    if data[:3] != JPEG:
        return None
    at = 2
    while data[at : at + 1] == b"\xff" and at + 10 <= len(data):
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame: its size and components
            height, width = (int.from_bytes(data[at + k : at + k + 2], "big") for k in (5, 7))
            return height, width, data[at + 9]
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def eight_bits(array: np.ndarray) -> np.ndarray:
    """Values scaled to eight bits by their dtype and range: 0..1, 0..255, 0..65535, or 0 to the maximum."""
    if array.dtype == np.uint8:
        return array
    values = np.nan_to_num(array.astype(np.float64), copy=False)
    values.clip(0, out=values)
    largest = float(values.max(initial=0))
    if np.issubdtype(array.dtype, np.floating):
        full = 1.0 if largest <= 1 else 255.0 if largest <= 255 else largest
    else:
        full = 65535.0 if largest <= 65535 else largest
    values *= 255 / full
    return values.round(out=values).astype(np.uint8)


def _many_channels(source: Path | bytes, channels: int, name: str) -> Tensor:
    """A .npy array or a multi-band TIFF, channels first or last."""
    data = source if isinstance(source, bytes) else read_file(source, name)
    if name.endswith(ARRAY_SUFFIX):
        array = np.load(io.BytesIO(data), allow_pickle=False)
    elif name.lower().endswith((".tif", ".tiff")):
        array = _read_tiff(data, channels, name)
    else:
        raise BadImage(name, f"images of {channels} channels must be .npy or .tif files")
    if not isinstance(array, np.ndarray):
        raise BadImage(name, "an archive, not an array")
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or channels not in (array.shape[0], array.shape[-1]):
        raise BadImage(name, f"shape {array.shape} has no first or last axis of {channels} channels")
    if array.shape[0] != channels:
        array = array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(eight_bits(array)))


def _read_tiff(data: bytes, channels: int, name: str) -> np.ndarray:
    try:
        import tifffile
    except ImportError as error:
        raise BadImage(name, "multi-band TIFFs need tifffile: pip install 'tico-ssl[tiff]'") from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        _require_size(series.shape, len(data), name, channels)
        return series.asarray()


def _reason(error: Exception) -> str:
    """One line, without the object names and folders in the messages of libraries."""
    if isinstance(error, UnidentifiedImageError):
        return "not in a known image format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _is_empty(source: Path | bytes) -> bool:
    return not source if isinstance(source, bytes) else source.is_file() and source.stat().st_size == 0
