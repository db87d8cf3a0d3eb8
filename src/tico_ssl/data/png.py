"""PNG files of sixteen bits, decoded to the values that they have. (Eight bits work, too; Pillow is as fast at those.)

Pillow reduces colours of sixteen bits to eight. torchvision does not, but it ends the process when libpng finds a fault
(0.29: a wrong checksum, too few pixels). So all that libpng could object to is looked at here, and what a decoder gets
is made anew: header, and rows without compression.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.codecs import decoder_of

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by type of colour; palettes are left out
GREY, RGB = 0, 2  # types that may have a transparent colour
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
LAST_FILTER = 4  # of those that a row may begin with


class Header(NamedTuple):
    """What a PNG begins with."""

    width: int
    height: int
    bits: int
    colours: int
    compression: int
    filter: int
    interlaced: int

    @property
    def channels(self) -> int:
        """Values of a pixel."""
        return CHANNELS[self.colours]

    def rows(self) -> Iterator[tuple[int, int]]:
        """How many rows there are of how many bytes, of each of the images that an interlaced file consists of."""
        for left, top, across, down in ADAM7 if self.interlaced else ((0, 0, 1, 1),):
            width, height = -(-(self.width - left) // across), -(-(self.height - top) // down)
            if width > 0 and height > 0:
                yield height, 1 + width * self.channels * self.bits // 8


def header_of(data: bytes) -> Header | None:
    """None: no PNG, or one of another kind, such as palettes."""
    if data[:16] != SIGNATURE + b"\0\0\0\x0dIHDR" or len(data) < 29:
        return None
    header = Header(*struct.unpack(">IIBBBBB", data[16:29]))
    sound = header.width and header.height and not header.compression and not header.filter and header.interlaced < 2
    return header if sound and header.bits in (8, 16) and header.colours in CHANNELS else None


def decode(data: bytes) -> Tensor:
    """Values (channels, height, width); of a colour that means transparent, opacity is one more channel. A fault is a
    ValueError."""
    header, decoder = header_of(data), decoder_of("png")
    if header is None or decoder is None:
        raise ValueError("no decoder for this PNG: install torchcodec")
    transparent, pixels = None, list[bytes]()
    for name, body in _chunks(data):
        if name == b"IDAT":
            pixels.append(body)
        elif name == b"tRNS" and header.colours in (GREY, RGB) and len(body) == 2 * header.channels:
            transparent = np.frombuffer(body, ">u2")
    rows = zlib.compress(_rows(b"".join(pixels), header), level=0)
    chunks = {b"IHDR": struct.pack(">IIBBBBB", *header), b"IDAT": rows, b"IEND": b""}
    values = decoder(SIGNATURE + b"".join(_chunk(name, body) for name, body in chunks.items()))
    return values if transparent is None else _with_opacity(values, transparent)


def _with_opacity(values: Tensor, transparent: np.ndarray) -> Tensor:
    array = values.numpy()
    opaque = (array != transparent[:, None, None].astype(array.dtype)).any(axis=0, keepdims=True)
    return torch.from_numpy(np.concatenate([array, opaque.astype(array.dtype) * np.iinfo(array.dtype).max]))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The parts of the file that matter, by their names, up to the end of the pixels."""
    at, begun = len(SIGNATURE), False
    while at + 12 <= len(data):
        end, name = at + 8 + int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if begun and name != b"IDAT":
            return
        begun = name == b"IDAT"
        if begun or name in (b"IHDR", b"tRNS"):
            if end + 4 > len(data):
                raise ValueError("image file is truncated")
            if data[end : end + 4] != zlib.crc32(data[at + 4 : end]).to_bytes(4, "big"):
                raise ValueError("damaged: a wrong checksum")
            yield name, data[at + 8 : end]
        at = end + 4


def _rows(compressed: bytes, header: Header) -> bytes:
    """The rows, as filtered."""
    size = sum(height * length for height, length in header.rows())
    try:
        rows = zlib.decompressobj().decompress(compressed, size)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error
    if len(rows) < size:
        raise ValueError("image file is truncated")
    values, at = np.frombuffer(rows, np.uint8), 0
    for height, length in header.rows():
        if (values[at : at + height * length : length] > LAST_FILTER).any():
            raise ValueError("damaged: an unknown filter")
        at += height * length
    return rows


def _chunk(name: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")
