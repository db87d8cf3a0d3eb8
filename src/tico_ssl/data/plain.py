"""Plain images, which most photos are: JPEGs, and upright WebP pictures without transparency.

Libraries that go straight to tensors decode them bitwise-identical to Pillow in 67 to 80 % of its time
(benchmarks/logs/development/decoding.jsonl). All other images are left to Pillow, and so are these if no library has a
decoder for them.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from torch import Tensor

from tico_ssl.data.codecs import decoder_of
from tico_ssl.data.headers import JPEG

ANIMATED, XMP, EXIF, TRANSPARENT = 0x02, 0x04, 0x08, 0x10  # flags of an extended WebP
NOTES, SCAN = 0xE1, 0xDA  # markers of a JPEG: EXIF or XMP, and the pixels
EXIF_NOTE = b"Exif\0\0"
ORIENTATION, SHORT = 274, 3  # a tag of EXIF, and the type that its value has
TURNED_BY_XMP = re.compile(rb'tiff:Orientation(?:="|>)[2-8]')  # as Pillow reads it


class Plain(NamedTuple):
    """What the header of a plain image says."""

    kind: Literal["jpeg", "webp"]
    height: int
    width: int

    def decode(self, data: bytes) -> Tensor | None:
        """Its pixels, RGB (3, height, width); None if no decoder can."""
        if (decoder := decoder_of(self.kind)) is not None:
            with suppress(Exception):  # Pillow gives the clearer error
                return decoder(data)
        return None


def plain(data: bytes) -> Plain | None:
    """The header of a plain image; None if it is another one."""
    if (frame := jpeg_frame(data)) is not None:
        return Plain("jpeg", *frame[:2]) if frame[2] in (1, 3) and _is_turned_by_first_exif(data) else None
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and (size := _webp_size(data)) is not None:
        return Plain("webp", *size)
    return None


def jpeg_frame(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and number of components of a JPEG, by its header; None if it is none, or has none."""
    for marker, at in _segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame: its size and components
            height, width = (int.from_bytes(data[at + k : at + k + 2], "big") for k in (5, 7))
            return height, width, data[at + 9]
    return None


def jpeg_notes(data: bytes) -> list[bytes]:
    """What a JPEG says of itself in EXIF and XMP, its orientation among it."""
    found = (at for marker, at in _segments(data) if marker == NOTES)
    return [data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")] for at in found]


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Markers of a JPEG before its pixels, and where they are."""
    at = 2 if data[:3] == JPEG else len(data)
    while data[at : at + 1] == b"\xff" and at + 10 <= len(data) and data[at + 1] != SCAN:
        yield data[at + 1], at
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _is_turned_by_first_exif(data: bytes) -> bool:
    """Whether the orientation of a JPEG, if it has one, is where torchvision looks for it."""
    notes = jpeg_notes(data)
    first, others = (notes[0], notes[1:]) if notes and notes[0].startswith(EXIF_NOTE) else (None, notes)
    if any(note.startswith(EXIF_NOTE) or TURNED_BY_XMP.search(note) for note in others):
        return False
    return first is None or _has_usual_orientation(first)


def _has_usual_orientation(exif: bytes) -> bool:
    """Whether the orientation is none or one short number; torchvision reads other types as if they were this one."""
    order = "<" if exif[6:8] == b"II" else ">"
    with suppress(struct.error):
        at = 6 + struct.unpack_from(order + "I", exif, 10)[0]
        entries = range(at + 2, at + 2 + 12 * struct.unpack_from(order + "H", exif, at)[0], 12)
        tags = [struct.unpack_from(order + "HHI", exif, entry) for entry in entries]
        return [tag for tag in tags if tag[0] == ORIENTATION] in ([], [(ORIENTATION, SHORT, 1)])
    return True  # cut off


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a WebP that is plain; lossy, lossless and extended files say it each in their own way."""
    if data[12:16] == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        return height, width
    if data[12:16] == b"VP8L" and data[20:21] == b"\x2f":
        bits = int.from_bytes(data[21:25], "little")
        transparent = bits >> 28 & 1
        return None if transparent else ((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if data[12:16] == b"VP8X" and len(data) > 30 and not data[20] & (ANIMATED | XMP | EXIF | TRANSPARENT):
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return height, width
    return None
