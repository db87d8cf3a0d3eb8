"""What the bytes of an image tell of its depth, and the deep images that Pillow would reduce to eight bits."""

import io
import re
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from tico_ssl.data import png, tiff
from tico_ssl.data.opening import open_picture

JPEG = b"\xff\xd8\xff"
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # of Pillow, with the values of the file
_GAP = rb"\s+(?:#[^\n]*\n\s*)*"
PNM = re.compile(rb"P([56])" + _GAP + rb"(\d+)" + _GAP + rb"(\d+)" + _GAP + rb"(\d+)\s")  # width, height, maximum


def needs_tifffile(file: BinaryIO, channels: int, page: int = 0) -> bool:
    """Whether Pillow would not open a page of a TIFF, would reduce its colours to eight bits, or would take deep values
    of which zero is white for those of which it is black."""
    if channels not in (1, 3):
        return True
    try:
        with open_picture(file) as image:
            image.seek(page)
            tags = image.getexif()
            bits, inverted = tags.get(tiff.BITS, 1), tags.get(tiff.COLOURS) == tiff.WHITE_IS_ZERO
            deepest = max(bits) if isinstance(bits, tuple) else bits
            return deepest > 8 and (inverted or image.mode not in DEEP_MODES)
    except (OSError, SyntaxError, EOFError):
        return _is_chained(file)


def _is_chained(file: BinaryIO) -> bool:
    """Whether a file is a TIFF at all; Pillow tells best what is wrong with one that is not."""
    try:
        return len(tiff.images_in(file, 3)) > 0
    except Exception:
        return False


def deep_colours(data: bytes, allow: tiff.Allow) -> np.ndarray | None:
    """A PNG or PPM of 16 bits, which Pillow would reduce to eight if it has colours. None if it is something else."""
    if (header := png.header_of(data)) is not None and header.bits == 16 and header.colours != png.GREY:
        allow(header.width, header.height)
        return png.decode(data).permute(1, 2, 0).numpy()
    if (found := PNM.match(data[:1024])) is not None and int(found[4]) > 255:
        width, height, samples = int(found[2]), int(found[3]), 3 if found[1] == b"6" else 1
        allow(width, height)
        return np.frombuffer(data, ">u2", width * height * samples, found.end()).reshape(height, width, samples)
    return None


def is_deep(data: bytes) -> bool:
    """Whether an image may have values of more than eight bits, by its header."""
    if data[:3] == JPEG or data[:4] in (b"RIFF", b"GIF8") or data[:2] == b"BM":
        return False
    if data[:8] == png.SIGNATURE:
        return data[24:25] == b"\x10"
    if data[:4] in tiff.MAGIC:
        with suppress(Exception), open_picture(io.BytesIO(data)) as image:
            return image.mode in DEEP_MODES or needs_tifffile(io.BytesIO(data), 3)
    return True
