"""From a file to pixels, in one place."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tico_ssl.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"}


def decode(path: Path, channels: int = 3) -> Tensor:
    """A file as uint8 (channels, height, width), turned upright as its EXIF data say."""
    try:
        with Image.open(path) as image:
            return pixels(ImageOps.exif_transpose(image), channels)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: not a readable image ({error})") from error


def pixels(image: Image.Image, channels: int = 3) -> Tensor:
    """A Pillow image as uint8 (channels, height, width)."""
    if channels not in (1, 3):
        raise UserError(f"image files give 1 or 3 channels, not {channels}; use a numpy archive")
    if image.mode.startswith("I;16") or image.mode == "I":  # which Pillow would clip, not scale
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    array = np.array(image.convert("RGB" if channels == 3 else "L"))
    return torch.from_numpy(array if channels == 3 else array[..., None]).permute(2, 0, 1).contiguous()
