"""Pillow for the formats that docs/data.md lists, and no others.

Left to itself, Pillow tries forty more: for EPS it starts Ghostscript, and an ICO or ICNS may hold another image than
its header says.
"""

from pathlib import Path
from typing import BinaryIO

from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # PPM includes PGM; JPEG, those of several pictures


def open_picture(file: Path | BinaryIO) -> Image.Image:
    """A picture whose header is read, and whose pixels are not decoded yet."""
    return Image.open(file, formats=FORMATS)
