"""A packed file: squares of one size, or small JPEGs, in one memory-mapped file.

    page        4,096 bytes: magic, version, position of the header, size of the file, a checksum
    data        fixed: uint8 (N, C, size, size); jpeg: encoded images
    index       start of each image in the data, and end of the last one (int64)
    checksums   of each image (CRC-32, uint32)
    labels      int64, one per image, or one per image and class; absent if there are none
    names       start of each name and end of the last one (int64), then the names
    header      JSON: description of the images, positions and checksums of the sections; since version 2 the splits,
                and the shorter side that the images had, if they were reduced

The images of a split are beside each other. A file without splits, of which all images are for training, and which
are not reduced, is one of version 1. A label of -1 is that of an image without.

Every byte is covered by a checksum. Opening checks all but the data, which may exceed memory; of those each image is
checked when it is first used, or all at once by `verify_packed`. The file may come from anyone: no size or position in
it is trusted.
"""

import json
import mmap
import os
import struct
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from zlib import crc32

import numpy as np
import torch
from pydantic import Field

from tico_ssl.config.section import Section, validate
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import BadImage, Reading
from tico_ssl.data.formats.folder import split_called
from tico_ssl.data.remote.objects import RemoteObject, Span, remote_objects
from tico_ssl.data.remote.urls import is_url
from tico_ssl.data.source import Reduced, Source, Split, file_identity, meant
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import track

SUFFIX = ".tico"
ENDINGS = (SUFFIX,)
MAGIC, PAGE = b"TICOPACK", 4096
PLAIN, SPLIT = VERSIONS = 1, 2  # of the format: without splits and of whole size, and with either
PREAMBLE = struct.Struct("<8sIIQQQ")  # magic, version, the header's checksum, offset and size, the size of the file
DAMAGED = "damaged: not the bytes that were packed"
CHECKERS = 4  # threads that compute checksums
# Linux refuses to map a file larger than its memory for writing, even privately, without this flag.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def matches(place: str) -> bool:
    """A file with the suffix."""
    if is_url(place):
        return place.endswith(ENDINGS)
    path = Path(place).expanduser()
    return path.suffix in ENDINGS and path.is_file()


def splits(place: str) -> dict[Split, str]:
    """The splits that were packed, each with the folder that its images were in."""
    return {split: folder for split, (folder, _) in _opened(place).splits.items()}


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """One of the splits; without any, all images are for training."""
    packed = _opened(place)
    found = packed.splits
    wanted = meant(split, found)
    if wanted is None:
        return None
    (folder, places), whole = found[wanted], _source(packed, reading)
    if not folder:
        return whole
    part = whole.subset(torch.arange(places.start, places.stop))
    labelled = part.labels is not None and bool((part.labels >= 0).any())
    labels, classes = (part.labels, part.classes) if labelled else (None, ())
    return replace(part, name=f"{whole.name}/{folder}", labels=labels, classes=classes)


def _opened(place: str) -> "Packed":
    return Packed(remote_objects([place])[0] if is_url(place) else Path(place).expanduser())


def open_packed(path: Path | RemoteObject, reading: Reading | None = None) -> Source:
    """The images of a packed file. Squares are a memory-mapped tensor, so nothing is read before it is used; those of
    an object in a store are read one at a time.

    JPEGs are decoded according to `reading` (None: as packed); squares are not converted.
    """
    return _source(Packed(path), reading)


def _source(packed: "Packed", reading: Reading | None) -> Source:
    path, header = packed.path, packed.header
    source = partial(
        Source,
        header.name,
        header.count,
        labels=packed.labels(),
        classes=tuple(header.classes),
        names=packed.name,
        reduced=Reduced(header.size, header.shorter) if header.shorter > header.size else None,
        identity=path.identity if isinstance(path, RemoteObject) else lambda i: file_identity(path, i),
    )
    if header.kind == "fixed" and isinstance(path, RemoteObject):
        return source(packed.square, content=packed.content)
    if header.kind == "fixed":
        images = packed.squares()

        def fetch(place: int) -> torch.Tensor:
            packed.require_right(place)
            return images[place]

        return source(fetch, images, mapped=True, verify=packed.verify)
    wanted = reading or Reading(header.channels)
    return source(lambda i: wanted.decode(packed.content(i), f"{path}: image {i}"), content=packed.content)


def verify_packed(path: Path, label: str | None = None) -> tuple[int, int]:
    """Verify all checksums of a packed file, which reads all of it. Returns its number of images and bytes."""
    packed = Packed(path)
    for i in track(range(packed.header.count), packed.header.count, label):
        try:
            packed.require_right(i)
        except BadImage as error:
            raise UserError(f"{path}: damaged (image {i}, {printable(packed.name(i))})") from error
    return packed.header.count, path.stat().st_size


Whole = Annotated[int, Field(ge=0)]


class Header(Section):
    """What the header of a packed file says."""

    name: str
    kind: Literal["fixed", "jpeg"]
    count: Annotated[int, Field(ge=1)]
    channels: Annotated[int, Field(ge=1)]
    size: Annotated[int, Field(ge=1)]
    classes: list[str]
    splits: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The number of images in each folder of a split, in their order."""
    shorter: Whole = 0
    """The median of the shorter sides before packing, in pixels; 0: images were not reduced, or nobody knows."""
    sections: dict[str, Annotated[tuple[Whole, Whole, Whole | None], Field(strict=False)]]


class Packed:
    """A packed file that has been opened and checked but for its images."""

    def __init__(self, path: Path | RemoteObject) -> None:
        self.path = path
        self._mapping = _mapped(path)
        self.header, self._sections = _header(path, self._mapping)
        count, content = self.header.count, self._sections
        self._require({"data", "index", "checksums", "names"} <= content.keys(), "a section is missing")
        self._require(len(content["checksums"]) == 4 * count and len(content["index"]) == 8 * count + 8, "sizes")
        self._begins, self._ends = self._bounds("index", len(content["data"]))
        self._name_begins, self._name_ends = self._bounds("names", len(content["names"]) - 8 * count - 8)
        self.splits = self._read_splits()
        self._checksums = np.frombuffer(content["checksums"], "<u4")
        self._verified = np.zeros(count, dtype=bool)
        if self.header.kind == "fixed":
            square = self.header.channels * self.header.size**2
            self._require(len(content["data"]) == count * square, "the size of its images")
            self._require(bool((self._ends - self._begins == square).all()), "index")

    def _require(self, right: bool, what: str) -> None:
        require(right, f"{self.path}: damaged ({what})")

    def _bounds(self, section: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of each piece, within the length of what they are pieces of."""
        content, count = self._sections[section], self.header.count
        self._require(len(content) >= 8 * count + 8, section)
        bounds = np.frombuffer(content, "<i8", count + 1)
        self._require(bounds[0] == 0 and bounds[-1] <= length and bool((bounds[:-1] <= bounds[1:]).all()), section)
        return bounds[:-1], bounds[1:]

    def _read_splits(self) -> dict[Split, tuple[str, range]]:
        """The splits, each with its folder and the places of its images."""
        if not self.header.splits:
            return {"train": ("", range(self.header.count))}
        found: dict[Split, tuple[str, range]] = {}
        end = 0
        for folder, count in self.header.splits.items():
            split = split_called(PurePosixPath(folder).name)
            if split is None or split in found:
                raise UserError(f"{self.path}: damaged (splits)")
            found[split] = folder, range(end, end := end + count)
        self._require(end == self.header.count, "splits")
        return found

    def labels(self) -> torch.Tensor | None:
        """One per image, or one per image and class."""
        if "labels" not in self._sections:
            return None
        content, count = self._sections["labels"], self.header.count
        self._require(len(content) > 0 and len(content) % (8 * count) == 0, "labels")
        return torch.tensor(np.frombuffer(content, "<i8")).view(count, -1).squeeze(1)

    def squares(self) -> torch.Tensor:
        """All images of one size, as they are on disk."""
        shape = self.header.count, self.header.channels, self.header.size, self.header.size
        return torch.frombuffer(self._sections["data"], dtype=torch.uint8).view(shape)

    def square(self, place: int) -> torch.Tensor:
        """One of the images of one size, as a copy."""
        shape = self.header.channels, self.header.size, self.header.size
        return torch.frombuffer(bytearray(self.content(place)), dtype=torch.uint8).view(shape)

    def name(self, place: int) -> str:
        """Any bytes, as a file name."""
        names = self._sections["names"][8 * self.header.count + 8 :]
        return os.fsdecode(bytes(names[self._name_begins[place] : self._name_ends[place]]))

    def content(self, place: int) -> bytes:
        """The bytes of an image."""
        self._require_whole()
        piece = bytes(self._piece(place))
        self._require_right(place, piece)
        return piece

    def require_right(self, place: int) -> None:
        """Refuse a damaged image, which counts as an unreadable one; what was right before is not read again."""
        self._require_whole()
        if not self._verified[place]:
            self._require_right(place, self._piece(place))

    def _require_right(self, place: int, piece: memoryview | bytes) -> None:
        if not self._verified[place] and crc32(piece) != self._checksums[place]:
            raise BadImage(f"{self.path}: image {place}, {printable(self.name(place))}", DAMAGED)
        self._verified[place] = True

    def _piece(self, place: int) -> memoryview | bytes:
        piece: memoryview | bytes = self._sections["data"][int(self._begins[place]) : int(self._ends[place])]
        return piece

    def verify(self, rows: torch.Tensor) -> None:
        """Refuse damaged images among those that are about to be used."""
        self._require_whole()
        places = rows.numpy()
        fresh = places[~self._verified[places]]
        if len(fresh):
            with ThreadPoolExecutor(CHECKERS) as pool:
                deque(pool.map(self.require_right, fresh.tolist()), maxlen=0)

    def _require_whole(self) -> None:
        """Reading what is mapped beyond the end of a file would end the process."""
        size = self._mapping.size()
        require(size >= len(self._mapping), f"{self.path}: was cut short while in use, to {size:,} bytes")


def _mapped(path: Path | RemoteObject) -> mmap.mmap | Span:
    """The file in memory. Writes go to private copies of pages, not to the file. Of an object, what will be read."""
    if isinstance(path, RemoteObject):
        require(path.read(0, len(MAGIC)) == MAGIC, f"{path}: not a packed file")
        return Span(path)
    with refusing(path, "read"), path.open("rb") as file:
        require(file.read(len(MAGIC)) == MAGIC, f"{path}: not a packed file")
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)


def _header(path: Path | RemoteObject, mapping: mmap.mmap | Span) -> tuple[Header, dict[str, Any]]:
    """The description of a file and its sections, all checked but for the data."""
    page, found = mapping[:PAGE], len(mapping)
    require(found >= PAGE, f"{path}: cut short, {found} bytes are left")
    _, version, checksum, offset, size, total = PREAMBLE.unpack_from(page)
    require(version in VERSIONS, f"{path}: packed in version {version} of the format, but this is version {SPLIT}")
    require(page == first_page(page[: PREAMBLE.size]), f"{path}: damaged (first page)")
    require(found == total, f"{path}: {'cut short' if found < total else 'too long'}, {found} of {total} bytes")
    text = mapping[offset : offset + size]
    require(crc32(text) == checksum, f"{path}: damaged (header)")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged (header)") from error
    header, sections = validate(Header, values, f"{path}: damaged header"), {}
    for name, (begin, end, checksum) in header.sections.items():
        sections[name] = _section(mapping, name, begin, end)
        require(len(sections[name]) == end - begin, f"{path}: damaged ({name} lies outside the file)")
        require(name == "data" or crc32(sections[name]) == checksum, f"{path}: damaged ({name})")
    return header, sections


def _section(mapping: mmap.mmap | Span, name: str, begin: int, end: int) -> Any:
    """Bytes of a file, without a copy; of an object they are read now, but for the data, which may exceed memory."""
    if isinstance(mapping, Span):
        return mapping.part(begin, end) if name == "data" else mapping[begin:end]
    return memoryview(mapping)[begin:end]


def first_page(preamble: bytes) -> bytes:
    """The first page of a packed file, with its own checksum."""
    padded = preamble.ljust(PAGE - 4, b"\0")
    return padded + crc32(padded).to_bytes(4, "little")


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
