"""TIFF files: which images are in one, and their values as they are, read with tifffile."""

import itertools
import lzma
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tico_ssl.data.names import TIFF_SUFFIXES
from tico_ssl.runtime.extras import install_command

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MOST_PAGES = 100_000  # per file; more are a mistake or an attack
KIND, WIDTH, HEIGHT, BITS, COLOURS, SAMPLES = 254, 256, 257, 258, 262, 277  # numbers of tags
TILE_WIDTH, TILE_HEIGHT = 322, 323
INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}  # types of tags
DEFLATE, LZMA = (8, 32946), 34925  # compressions
LOSSLESS = (1, 5, 32773, 50000, LZMA, *DEFLATE)  # those that leave colours to the reader
WHITE_IS_ZERO, RGB, CMYK, YCBCR, LAB = 0, 2, 5, 6, (8, 9, 10)  # kinds of colours
MULTIPLIED, SEPARATE = 1, 2  # kinds of a further sample that is opacity: colours are multiplied by it, or not
Allow = Callable[[int, int], None]
Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image."""


class Page(NamedTuple):
    """A page by its tags: place in the file, size, samples per pixel, whether it is a smaller copy of another, and the
    size of its tiles (0 if it has strips, which are as wide as the page and no higher)."""

    place: int
    height: int
    width: int
    samples: int
    reduced: bool
    tile_height: int
    tile_width: int


def is_tiff(name: str) -> bool:
    """By the suffix of a file."""
    return name.lower().endswith(TIFF_SUFFIXES)


def images_in(file: BinaryIO, channels: int) -> list[tuple[int, ...]]:
    """The images of a file, each as the places of its pages: those of the first one's size, without smaller copies.

    With other numbers of channels than 1 and 3, pages of one sample each are channels: so many of them are an image.
    """
    pages = list(_pages(file))
    if not pages:
        raise ValueError("a TIFF without pages")
    first = pages[0]
    whole = [page.place for page in pages if page[1:4] == first[1:4] and not page.reduced] or [0]
    if channels in (1, 3) or first.samples != 1:
        return [(place,) for place in whole]
    if len(whole) % channels:
        raise ValueError(f"has {len(whole)} pages of one channel, while backbone.channels is {channels}")
    return [tuple(whole[i : i + channels]) for i in range(0, len(whole), channels)]


def size_of(file: BinaryIO, channels: int) -> tuple[int, int, int]:
    """Height and width of the images of a file, and their number."""
    found = images_in(file, channels)
    first = next(_pages(file))
    return first.height, first.width, len(found)


def decoded_size(file: BinaryIO, place: int) -> tuple[int, int]:
    """Width and height that memory is taken for when a page is decoded: its own, or those of a tile if that is larger,
    since a tile may claim any size."""
    page = next(itertools.islice(_pages(file), place, None))
    return max((page.width, page.height), (page.tile_width, page.tile_height), key=math.prod)


def _pages(file: BinaryIO) -> Iterator[Page]:
    """The chain of directories; a circle or a chain that leaves the file ends in an error."""
    file.seek(0)
    head = file.read(16)
    if head[:4] not in MAGIC:
        raise ValueError("not a TIFF file")
    order, big = "<" if head[:2] == b"II" else ">", 43 in head[2:4]
    at, seen = struct.unpack(order + ("Q" if big else "I"), head[8:16] if big else head[4:8])[0], set[int]()
    while at:
        if at in seen or len(seen) >= MOST_PAGES:
            raise ValueError(f"a TIFF of more than {len(seen)} pages, or one whose pages form a circle")
        seen.add(at)
        tags, at = _directory(file, at, order, big)
        if tags.get(WIDTH, 0) < 1 or tags.get(HEIGHT, 0) < 1:
            raise ValueError("a TIFF page without a size")
        reduced, tile = bool(tags.get(KIND, 0) & 5), (tags.get(TILE_HEIGHT, 0), tags.get(TILE_WIDTH, 0))
        yield Page(len(seen) - 1, tags[HEIGHT], tags[WIDTH], tags.get(SAMPLES, 1), reduced, *tile)


def _directory(file: BinaryIO, at: int, order: str, big: bool) -> tuple[dict[int, int], int]:
    """The first values of the tags of a page, as far as they are whole numbers, and where the next page is."""
    entry, number, offset = (20, "Q", "Q") if big else (12, "H", "I")
    file.seek(at)
    (count,) = struct.unpack(order + number, file.read(struct.calcsize(order + number)))
    if count > 4096:
        raise ValueError(f"a TIFF page of {count} tags")
    table = file.read(count * entry)
    tags: dict[int, int] = {}
    for begin in range(0, len(table), entry):
        tag, kind = struct.unpack_from(order + "HH", table, begin)
        if kind in INTEGERS:
            (value,) = struct.unpack_from(order + INTEGERS[kind], table, begin + (12 if big else 8))
            # Of a tag that is there twice, libtiff takes the first and others the last: here it is the larger tile.
            tags[tag] = max(value, tags.get(tag, 0)) if tag in (TILE_WIDTH, TILE_HEIGHT) else value
    (following,) = struct.unpack(order + offset, file.read(struct.calcsize(order + offset)))
    return tags, following


def read_tiff(file: BinaryIO, number: int, channels: int, allow: Allow, box: Box | None = None) -> np.ndarray:
    """An image of a file, or a part of it, as (height, width, channels). `allow` refuses sizes, of the strips or tiles
    that are decoded, too."""
    try:
        import tifffile
    except ImportError as error:
        raise ValueError(f"TIFFs of this kind need tifffile: {install_command('tiff')}") from error
    places = images_in(file, channels)[number]
    file.seek(0)
    with tifffile.TiffFile(file) as tiff:
        pages: list[Any] = [tiff.pages[place] for place in places]
        found = sum(page.samplesperpixel for page in pages)
        if found != channels and not (channels in (1, 3) and found <= 4):  # before memory is taken for so many
            raise ValueError(f"has {found} channels, while backbone.channels is {channels}")
        parts = [_values(page, allow, box) for page in pages]
        if channels in (1, 3):
            parts[0] = _colours(parts[0], pages[0])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _values(page: Any, allow: Allow, box: Box | None) -> np.ndarray:
    top, left, height, width = box or (0, 0, page.imagelength, page.imagewidth)
    allow(width, height)
    allow(*reversed(_segment(page)))
    array = _part(page, (top, left, height, width))
    if "S" not in page.axes:
        array = array[..., None]
    elif page.axes.index("S") < page.axes.index("Y"):
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3:
        raise ValueError(f"a TIFF page of shape {array.shape}")
    if page.photometric == WHITE_IS_ZERO and array.dtype.kind in "bu":
        array = ~array
    if page.photometric == 3 and page.colormap is not None:
        array = (np.moveaxis(page.colormap[:, array[..., 0]], 0, -1) >> 8).astype(np.uint8)
    orientation = page.tags.get("Orientation")
    return array if orientation is None or box is not None else _upright(array, int(orientation.value))


def _colours(array: np.ndarray, page: Any) -> np.ndarray:
    """Grey or RGB, with or without transparency."""
    whole, rgb_and_more = array.dtype.kind == "u", page.photometric == RGB and array.shape[-1] == 4
    if page.photometric == CMYK and array.shape[-1] == 4 and whole:
        full = np.iinfo(array.dtype).max
        light = full - array.astype(np.float64)
        array = (light[..., :3] * light[..., 3:] / full).round().astype(array.dtype)
    elif page.photometric in (CMYK, *LAB) or (page.photometric == YCBCR and page.compression in LOSSLESS):
        raise ValueError(f"colours of the kind {page.photometric.name}")
    elif rgb_and_more and not {*page.extrasamples} & {MULTIPLIED, SEPARATE}:
        array = array[..., :3]
    elif rgb_and_more and MULTIPLIED in page.extrasamples and whole:
        array = _divided(array)
    return array


def _divided(array: np.ndarray) -> np.ndarray:
    """RGB that was multiplied by its opacity, as it was before."""
    full, opacity = np.iinfo(array.dtype).max, array[..., 3:].astype(np.float64)
    colours = array[..., :3] * (full / opacity.clip(min=1))
    return np.concatenate([colours.clip(max=full).round().astype(array.dtype), array[..., 3:]], axis=-1)


def _part(page: Any, box: Box) -> np.ndarray:
    """A part of a page, for which only the strips or tiles are decoded that it touches."""
    top, left, height, width = box
    planes = page.samplesperpixel if page.planarconfig == 2 else 1
    depth = 1 if page.planarconfig == 2 else page.samplesperpixel
    found = np.zeros((planes, height, width, depth), page.dtype)
    file = page.parent.filehandle
    tall, wide = _segment(page)
    across, down = -(-page.imagewidth // wide), -(-page.imagelength // tall)
    for plane in range(planes):
        for row in range(top // tall, min(down, -(-(top + height) // tall))):
            for column in range(left // wide, min(across, -(-(left + width) // wide))):
                index = (plane * down + row) * across + column
                _copy(page, file, index, found[plane], (row * tall - top, column * wide - left))
    if page.planarconfig == 2:
        return found[..., 0]
    return found[0] if "S" in page.axes else found[0, ..., 0]


def _copy(page: Any, file: Any, index: int, found: np.ndarray, at: tuple[int, int]) -> None:
    """Decode a strip or tile, and copy what of it lies within; what the file leaves out is zero."""
    if page.databytecounts[index] == 0:
        return
    file.seek(page.dataoffsets[index])
    content = file.read(page.databytecounts[index])
    _require_bounded(content, page)
    segment = page.decode(content, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)[0]
    if segment is None:
        return
    segment = segment[0]  # of depth 1
    top, left = max(0, at[0]), max(0, at[1])
    inner = segment[top - at[0] :, left - at[1] :][: found.shape[0] - top, : found.shape[1] - left]
    found[top : top + inner.shape[0], left : left + inner.shape[1]] = inner


def _segment(page: Any) -> tuple[int, int]:
    """Height and width of a page's tiles, or of its strips, which may claim to be higher than the page."""
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return min(page.rowsperstrip, page.imagelength), page.imagewidth


def _require_bounded(content: bytes, page: Any) -> None:
    """Refuse a compressed strip or tile that is larger than its page says: tifffile's own decoders have no limit."""
    tall, wide = _segment(page)
    limit = tall * wide * page.samplesperpixel * page.dtype.itemsize
    if page.compression in DEFLATE:
        inflater = zlib.decompressobj()
        inflater.decompress(content, limit)
        excess = inflater.unconsumed_tail and inflater.decompress(inflater.unconsumed_tail, 1)
    elif page.compression == LZMA:
        unpacker = lzma.LZMADecompressor()
        unpacker.decompress(content, limit)
        excess = b"" if unpacker.eof else unpacker.decompress(b"", 1)
    else:
        return
    if excess:
        raise ValueError(f"a strip or tile of more than {limit:,} bytes")


def _upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """Turned and mirrored as the tag says, like Pillow's."""
    if orientation in (5, 6, 7, 8):
        array = array.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    return array[:, ::-1] if orientation in (2, 3, 6, 7) else array
