"""A packed file: squares of one size, or small JPEGs, in one memory-mapped file.

    page        4,096 bytes: magic, version, position of the header, size of the file, a checksum
    data        fixed: uint8 (N, C, size, size); jpeg: encoded images
    index       start of each image in the data, and end of the last one (int64)
    checksums   of each image (CRC-32, uint32)
    labels      int64, one per image, or one per image and class; absent if there are none
    names       start of each name and end of the last one (int64), then the names
    header      JSON: description of the images, positions and checksums of the sections

Every byte is covered by a checksum. Opening checks all but the data, which may exceed memory; verifying reads all.
"""

import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import Reading
from tico_ssl.data.source import Source, Split, file_identity
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import track

SUFFIX = ".tico"
ENDINGS = (SUFFIX,)
MAGIC, VERSION, PAGE = b"TICOPACK", 1, 4096
PREAMBLE = struct.Struct("<8sIIQQQ")  # magic, version, the header's checksum, offset and size, the size of the file
# Linux refuses to map a file larger than its memory for writing, even privately, without this flag.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def matches(place: str) -> bool:
    """A file with the suffix."""
    path = Path(place).expanduser()
    return path.suffix in ENDINGS and path.is_file()


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Training split only."""
    return open_packed(Path(place).expanduser(), reading) if split == "train" else None


def open_packed(path: Path, reading: Reading | None = None) -> Source:
    """The images of a packed file. Squares are a memory-mapped tensor, so nothing is read before it is used.

    JPEGs are decoded according to `reading` (None: as packed); squares are not converted.
    """
    header, sections = _mapped(path)
    count, size, content, name = header["count"], header["size"], _images(header, sections), _names(header, sections)
    labels = None
    if "labels" in sections:
        labels = torch.tensor(np.frombuffer(sections["labels"], "<i8")).view(count, -1).squeeze(1)
    source = partial(
        Source,
        header["name"],
        count,
        labels=labels,
        classes=tuple(header["classes"]),
        names=name,
        identity=lambda i: file_identity(path, i),
    )
    if header["kind"] == "fixed":
        images = torch.frombuffer(sections["data"], dtype=torch.uint8).view(count, header["channels"], size, size)
        return source(images.__getitem__, images, mapped=True)
    wanted = reading or Reading(header["channels"])
    return source(lambda i: wanted.decode(content(i), f"{path}: image {i}"))


def verify_packed(path: Path, label: str | None = None) -> tuple[int, int]:
    """Verify all checksums of a packed file, which reads all of it. Returns its number of images and bytes."""
    header, sections = _mapped(path)
    count, content, name = header["count"], _images(header, sections), _names(header, sections)
    checksums = np.frombuffer(sections["checksums"], "<u4")
    for i in track(range(count), count, label):
        require(crc32(content(i)) == checksums[i], f"{path}: damaged (image {i}, {printable(name(i))})")
    return count, path.stat().st_size


def _mapped(path: Path) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The header and the memory-mapped sections. Writes go to private copies of pages, not to the file."""
    with refusing(path, "read"), path.open("rb") as file:
        require(file.read(len(MAGIC)) == MAGIC, f"{path}: not a packed file")
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    page, whole, found = mapping[:PAGE], memoryview(mapping), len(mapping)
    require(found >= PAGE, f"{path}: cut short, {found} bytes are left")
    _, version, checksum, offset, size, total = PREAMBLE.unpack_from(page)
    require(version == VERSION, f"{path}: packed in version {version} of the format, but this is version {VERSION}")
    require(page == first_page(page[: PREAMBLE.size]), f"{path}: damaged (first page)")
    require(found == total, f"{path}: {'cut short' if found < total else 'too long'}, {found} of {total} bytes")
    text = mapping[offset : offset + size]
    require(crc32(text) == checksum, f"{path}: damaged (header)")
    header = json.loads(text)
    sections = {name: whole[begin:end] for name, (begin, end, _) in header["sections"].items()}
    for name, (_, _, checksum) in header["sections"].items():
        require(name == "data" or crc32(sections[name]) == checksum, f"{path}: damaged ({name})")
    return header, sections


def first_page(preamble: bytes) -> bytes:
    """The first page of a packed file, with its own checksum."""
    padded = preamble.ljust(PAGE - 4, b"\0")
    return padded + crc32(padded).to_bytes(4, "little")


def _images(header: dict[str, Any], sections: dict[str, memoryview]) -> Callable[[int], bytes]:
    return _pieces(sections["data"], sections["index"], header["count"])


def _names(header: dict[str, Any], sections: dict[str, memoryview]) -> Callable[[int], str]:
    names, count = sections["names"], header["count"]
    name = _pieces(names[8 * count + 8 :], names, count)
    return lambda i: os.fsdecode(name(i))


def _pieces(content: memoryview, bounds: memoryview, count: int) -> Callable[[int], bytes]:
    limits = np.frombuffer(bounds, "<i8", count + 1)
    begins, ends = limits[:-1], limits[1:]
    return lambda i: bytes(content[begins[i] : ends[i]])


def require(right: bool, otherwise: str) -> None:
    """Raise an error unless the condition holds."""
    if not right:
        raise UserError(otherwise)


@contextmanager
def refusing(path: Path, done: str) -> Iterator[None]:
    """Errors of the operating system, such as a missing file or a full disk, as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be {done} ({error.strerror or error})") from error
