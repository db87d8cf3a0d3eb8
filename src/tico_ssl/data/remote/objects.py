"""Objects in stores, as readers of formats use them: a size, a version, and bytes at any place."""

import io
import itertools
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tico_ssl.data.remote import blocks, urls
from tico_ssl.data.remote.client import ask
from tico_ssl.data.remote.stores import Known

TOGETHER = 1 << 28  # bytes that are read together
AT_ONCE = 1 << 24  # bytes of a sequential read that are asked for together, and come by several requests


class RemoteObject:
    """An object in a store. It may be read by several threads, and by forks of the process that opened it."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.name, self.size, self.modified = urls.name_of(known.url), known.size, known.modified
        self._folder = blocks.folder_of(urls.parent(known.url))

    def __str__(self) -> str:
        return self.known.url

    def read(self, begin: int, size: int) -> bytes:
        """Bytes, from the cache if all are there. Fewer at the end of the object."""
        end = min(begin + size, self.size)
        if begin >= end:
            return b""
        if (kept := self.kept(begin, end)) is not None:
            return kept
        return ask("parts", parts=[(self.known, begin, end)])

    def kept(self, begin: int, end: int) -> bytes | None:
        """Bytes, if the cache has them all."""
        if self._folder is None:
            return None
        parts = []
        for number, first, last in blocks.pieces(begin, end):
            if (part := self._folder.read(*blocks.block_of(self.known, number), first, last)) is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def open(self) -> BinaryIO:
        """The object as a file that is read from its beginning to its end: what comes next is read ahead."""
        return io.BufferedReader(ObjectFile(self), AT_ONCE)

    def identity(self, place: int | None = None) -> bytes:
        """The identity of an image at a position in this object."""
        url, size, version, _ = self.known
        at = b"" if place is None else b"%d\0" % place
        return os.fsencode(url) + f"\0{size} {version}\0".encode() + at

    def cache_path(self, suffix: str) -> Path | None:
        """Where something is kept that was computed from this object as it is; None if nothing can be kept."""
        known = blocks.code(self.known.url, self.known.version, self.size)
        return None if self._folder is None else self._folder.path / f"{known}{suffix}"


Part = tuple[RemoteObject, int, int]
"""An object, a place in it, and a number of bytes."""


class Near:
    """Parts of objects that a thread has read together, until it reads the next ones, and the last that it has read
    alone, since whoever decodes an image may ask for its bytes again."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def bring(self, parts: Sequence[Part]) -> None:
        """Read parts, as many as memory allows: from the cache, and the others by requests at the same time."""
        near: dict[Part, bytes | None] = {}
        room = TOGETHER
        for blob, begin, size in parts:
            room -= size
            if room >= 0:
                near[blob, begin, size] = blob.kept(begin, begin + size)
        missing = [part for part, content in near.items() if content is None]
        if missing:
            whole = ask("parts", parts=[(blob.known, begin, begin + size) for blob, begin, size in missing])
            ends = itertools.accumulate(size for _, _, size in missing)
            near |= {part: whole[end - part[2] : end] for part, end in zip(missing, ends, strict=True)}
        self._mine.parts = near

    def read(self, blob: RemoteObject, begin: int, size: int) -> bytes:
        """One of them, or any other."""
        part = blob, begin, size
        for near in ("parts", "last"):
            if (content := getattr(self._mine, near, {}).get(part)) is not None:
                return bytes(content)
        content = blob.read(begin, size)
        self._mine.last = {part: content}
        return content


class ObjectFile(io.RawIOBase):
    """An object as a file of which exactly those bytes are read that are asked for."""

    def __init__(self, blob: RemoteObject) -> None:
        self._blob, self._at = blob, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        content = self._blob.read(self._at, len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class Span:
    """Consecutive bytes of an object, which are read where they are sliced."""

    def __init__(self, blob: RemoteObject, begin: int = 0, end: int | None = None) -> None:
        self._blob, self._begin = blob, min(begin, blob.size)
        self._end = blob.size if end is None else min(end, blob.size)

    def __len__(self) -> int:
        return max(0, self._end - self._begin)

    def __getitem__(self, wanted: slice) -> bytes:
        begin, end, _ = wanted.indices(len(self))
        return self._blob.read(self._begin + begin, end - begin)

    def part(self, begin: int, end: int) -> "Span":
        """Some of these bytes."""
        return Span(self._blob, self._begin + begin, self._begin + end)

    def size(self) -> int:
        """How many there are."""
        return len(self)


def remote_objects(places: Sequence[str]) -> list[RemoteObject]:
    """The objects of these urls, which must exist."""
    return [RemoteObject(Known(*known)) for known in json.loads(ask("head", urls=list(places)))]


def require_there(place: str) -> None:
    """Refuse the url of an object that is not there; what braces and patterns stand for is found when it is opened."""
    if not (urls.is_folder(place) or urls.is_pattern(place) or "{" in place):
        remote_objects([place])


def remote_folder(url: str, deep: bool = False) -> list[RemoteObject]:
    """The objects in a folder, sorted, without hidden ones."""
    folder = url if url.endswith("/") else url + "/"
    found = [Known(*known) for known in json.loads(ask("list", url=folder, deep=deep))]
    return [RemoteObject(known) for known in sorted(found) if not urls.name_of(known.url).startswith(".")]


def remote_pattern(url: str) -> list[RemoteObject]:
    """The objects that match a pattern such as s3://bucket/train-*.tar."""
    before = url[: min(url.find(sign) for sign in urls.WILD if sign in url)].rpartition("/")[0] + "/"
    found = remote_folder(before, deep="/" in url[len(before) :])
    chosen = set(urls.matching(url, [str(blob) for blob in found]))
    return [blob for blob in found if str(blob) in chosen]
