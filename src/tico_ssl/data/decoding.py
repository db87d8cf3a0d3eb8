"""Decoding: from a file or its bytes to pixels.

Every file becomes a tensor with the network's number of channels and the values that it has: rotated by EXIF
orientation, for one and three channels transparency on white, CMYK and palettes as RGB. Values of more than eight bits
keep their depth here; `depth` maps them to bytes.

Pixels keep the memory order of the decoders, channels last, in a tensor of shape (channels, height, width).
"""

import functools
import io
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from tico_ssl.data import bands, dicom, tiff
from tico_ssl.data.depth import to_bytes
from tico_ssl.data.headers import JPEG, deep_colours, needs_tifffile
from tico_ssl.data.names import ARRAY_SUFFIX
from tico_ssl.data.opening import open_picture
from tico_ssl.data.plain import ORIENTATION, Plain, plain
from tico_ssl.runtime.errors import UserError

MOST_PIXELS = 1 << 27  # per image, 134 million; a larger claim is a mistake or an attack
# A photograph has far more bytes than one for so many pixels; smaller images may well be of a single colour.
LARGE, PIXELS_PER_BYTE = 1 << 26, 128
MOST_BYTES = 1 << 31  # per file
MOST_TILED = 1 << 29  # pixels of an image that is decoded whole to be read in tiles: 1.6 GB of colours
_opening = threading.RLock()
MOST_SCANS = 500  # of a JPEG, each of which goes over the whole image; usual progressive ones have ten


class BadImage(UserError):
    """An unreadable image, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: not a readable image ({reason})")
        self.name, self.reason = name, reason


class Part(NamedTuple):
    """A part of a file: which of its images, and which piece of that (None: all of it)."""

    number: int = 0
    box: tiff.Box | None = None


class Reading(NamedTuple):
    """How to decode images: the number of channels, and the minimum length of the shorter side, in pixels, for JPEGs
    that may be decoded at 1/2, 1/4 or 1/8 of their size (None: full size); whether the window of a DICOM file is
    applied; the side of the tiles that larger images are read as (None: no tiles), and the least contrast of these."""

    channels: int = 3
    shorter: int | None = None
    windowed: bool = True
    tiles: int | None = None
    contrast: float = 0.0

    def decode(self, source: Path | bytes, name: str | None = None, part: Part | None = None) -> Tensor:
        """An image (channels, height, width), its values as deep as they are."""
        return values(source, self, name, part)

    def pixels(self, image: Image.Image) -> Tensor:
        """The same for a Pillow image; a JPEG that is not loaded yet is decoded here."""
        if self.shorter is not None:
            image.draft(None, (self.shorter, self.shorter))
        return bands.of_picture(image, self.channels)


IN_FULL = Reading()


def decode(source: Path | bytes, channels: int = 3, name: str | None = None, shorter: int | None = None) -> Tensor:
    """An image as uint8 (channels, height, width), for which no range of values is known. For `channels` and `shorter`
    see Reading."""
    return to_bytes(values(source, Reading(channels, shorter), name), None)


def values(source: Path | bytes, reading: Reading, name: str | None = None, part: Part | None = None) -> Tensor:
    """An image (channels, height, width) with its values as they are: uint8, or deeper."""
    name = name or (str(source) if isinstance(source, Path) else "image")
    try:
        if part is not None and isinstance(source, Path):
            return _of_file(source, reading, name, part)
        data = source if isinstance(source, bytes) else read_file(source, name)
        return _of_bytes(data, reading, name)
    except BadImage:
        raise
    except Exception as error:  # decoders fail in many ways
        raise BadImage(name, "empty file" if _is_empty(source) else _reason(error)) from error


def _of_bytes(data: bytes, reading: Reading, name: str) -> Tensor:
    """By the content, which says more than the name; arrays are known by their suffix."""
    channels, shorter = reading.channels, reading.shorter
    if name.endswith(ARRAY_SUFFIX):
        return _of_npy(data, channels, name)
    if data[:3] == JPEG and data.count(b"\xff\xda") > MOST_SCANS:
        raise BadImage(name, f"a JPEG of more than {MOST_SCANS} scans")
    if channels == 3 and (found := plain(data)) is not None and _is_read_whole(found, shorter, len(data)):
        pixels = found.decode(data)
        if pixels is not None:
            return pixels
    if data[dicom.MARK] == b"DICM" or (data[:4] in tiff.MAGIC and needs_tifffile(io.BytesIO(data), channels)):
        return _of_part(io.BytesIO(data), reading, name, Part())
    if (deep := deep_colours(data, lambda width, height: _require_size((width, height), len(data), name))) is not None:
        return bands.of_array(deep, channels)
    with open_picture(io.BytesIO(data)) as image:
        _require_size(_decoded_size(image, io.BytesIO(data)), len(data), name)
        if shorter is not None:
            image.draft(None, (shorter, shorter))  # affects JPEGs only
        ImageOps.exif_transpose(image, in_place=True)
        return bands.of_picture(image, channels)


def _is_read_whole(image: Plain, shorter: int | None, bytes: int) -> bool:
    """Whether a plain image is of a valid size, and no JPEG that may be reduced."""
    reducible = image.kind == "jpeg" and shorter is not None and min(image.height, image.width) >= 2 * shorter
    return _fits(image.height * image.width, bytes) and not reducible


def _of_file(path: Path, reading: Reading, name: str, part: Part) -> Tensor:
    """An image of a file that has several, or a piece of one."""
    if tiff.is_tiff(path.name) or dicom.is_dicom(path.name):
        with open_file(path, name) as file:
            return _of_part(file, reading, name, part)
    if part.box is None:
        return _of_bytes(read_file(path, name), reading, name)
    status = path.stat()
    top, left, height, width = part.box
    with _opening:  # one thread decodes, the others find it done
        whole = _whole(path, reading.channels, (status.st_size, status.st_mtime_ns))
    return whole[:, top : top + height, left : left + width].clone(memory_format=torch.preserve_format)


@functools.lru_cache(maxsize=1)
def _whole(path: Path, channels: int, _: tuple[int, int]) -> Tensor:
    """A large image that is read in tiles but can only be decoded whole; the last one is kept for its other tiles."""

    def allow(width: int, height: int) -> None:
        _require_tileable(width, height, path.name)

    data = read_file(path, path.name)
    if (deep := deep_colours(data, allow)) is not None:
        return bands.of_array(deep, channels)
    with _large_pictures(), open_picture(io.BytesIO(data)) as image:
        allow(*_decoded_size(image, io.BytesIO(data)))
        ImageOps.exif_transpose(image, in_place=True)
        return bands.of_picture(image, channels)


@contextmanager
def _large_pictures() -> Iterator[None]:
    """Within, Pillow opens images as large as may be tiled; others are refused by their size all the same."""
    with _opening:
        usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MOST_TILED
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = usual


def picture_size(file: BinaryIO) -> tuple[int, int]:
    """Height and width of an image once it is upright, by its header."""
    with _large_pictures(), open_picture(file) as image:
        width, height = image.size
        return (width, height) if image.getexif().get(ORIENTATION) in (5, 6, 7, 8) else (height, width)


def _of_part(file: BinaryIO, reading: Reading, name: str, part: Part) -> Tensor:
    """An image of a file that has several, or a piece of one."""
    size, head = file.seek(0, os.SEEK_END), (file.seek(0), file.read(132))[1]

    def allow(width: int, height: int) -> None:
        if part.box is None:
            _require_size((width, height), size, name)
        else:
            _require_tileable(width, height, name)

    if head[dicom.MARK] == b"DICM" or dicom.is_dicom(name):
        array = dicom.read_dicom(file, part.number, reading.windowed, allow)
    else:
        first = tiff.images_in(file, reading.channels)[part.number][0]
        if part.box is None and not needs_tifffile(file, reading.channels, first):
            return _of_page(file, first, reading.channels, allow)
        array = tiff.read_tiff(file, part.number, reading.channels, allow, part.box)
    return bands.of_array(np.ascontiguousarray(array), reading.channels)


def _of_page(file: BinaryIO, page: int, channels: int, allow: tiff.Allow) -> Tensor:
    """A page of a TIFF by Pillow, which has more decoders and colours than tifffile alone."""
    with open_picture(file) as image:
        image.seek(page)
        allow(*_decoded_size(image, file, page))
        ImageOps.exif_transpose(image, in_place=True)
        return bands.of_picture(image, channels)


def _decoded_size(image: Image.Image, file: BinaryIO, page: int = 0) -> tuple[int, int]:
    """Width and height that memory is taken for when a picture is decoded: its own, unless libtiff decodes tiles."""
    tiles = getattr(image, "tile", ())
    return tiff.decoded_size(file, page) if tiles and tiles[0][0] == "libtiff" else image.size


def read_file(path: Path, name: str) -> bytes:
    """The content of a regular file of a valid size."""
    with open_file(path, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise BadImage(name, f"{size:,} bytes")
        try:
            return file.read()
        except OSError as error:
            raise BadImage(name, error.strerror or str(error)) from error


def open_file(path: Path, name: str) -> BinaryIO:
    """A regular file: nothing that waits for a writer, never ends or acts when it is read."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - handed over
    except OSError as error:  # a broken link, no permission
        raise BadImage(name, error.strerror or str(error)) from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise BadImage(name, "not a regular file")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_size(size: tuple[int, ...], bytes: int, name: str) -> None:
    """Refuse an image by its header, before memory is taken for it."""
    if not _fits(math.prod(size), bytes):
        raise BadImage(name, f"{' x '.join(map(str, size))} pixels in {bytes:,} bytes")


def _require_tileable(width: int, height: int, name: str) -> None:
    """The same for what is decoded at once to be read in tiles."""
    if width * height > MOST_TILED:
        raise BadImage(name, f"{width} x {height} pixels at once; only TIFF files of small blocks may have so many")


def _fits(pixels: int, bytes: int) -> bool:
    return pixels <= MOST_PIXELS and (pixels <= LARGE or pixels <= PIXELS_PER_BYTE * bytes)


def _of_npy(data: bytes, channels: int, name: str) -> Tensor:
    """A .npy array, channels first, last or absent."""
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise BadImage(name, "an archive, not an array")
    return bands.of_stack(array, channels)


def _reason(error: Exception) -> str:
    """One line, without the object names and folders in the messages of libraries."""
    if isinstance(error, UnidentifiedImageError):
        return "not in a known image format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _is_empty(source: Path | bytes) -> bool:
    return not source if isinstance(source, bytes) else source.is_file() and source.stat().st_size == 0
