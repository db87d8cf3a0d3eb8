"""Bytes of objects that were read, in blocks on the disk, where later commands find them.

A block is a file in the cache folder, called by a digest of the object's url, version and size, so an object that
changes is another one. It begins with checksums of its pages, and of these every one that is read is verified, so what
is damaged counts as missing. Several processes may read and write at once: a block appears whole or not at all.

The folder has a limit (`tico cache`). Blocks that were used before this command make room, the least recently used
first, and those of this command do not: data that do not fit are kept in part, and the rest is read anew each time.
"""

import functools
import hashlib
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from tico_ssl.data.remote.stores import Known
from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.files import remove_old_temporaries

BLOCK = 1 << 22  # bytes of an object that are fetched and kept together
PAGE = 1 << 14  # bytes that have a checksum of their own: an image is verified without reading its whole block
SUFFIX = ".block"
SHARE, MOST = 32, 1 << 28  # of the room, and bytes, that are written before others' writes are looked at
TICK = 0.01  # seconds by which the time of a file may be behind the clock
PATIENCE = 60.0  # seconds after which a full cache is looked at again


@functools.lru_cache(1 << 16)
def code(*known: object) -> str:
    """A name that stands for values."""
    return hashlib.sha256("\0".join(map(str, known)).encode()).hexdigest()[:24]


class Folder:
    """The blocks of all objects of one folder of a store."""

    def __init__(self, path: Path) -> None:
        self.path, self.since = path, time.time() - TICK
        self._held = cache_folder.held(path)
        self._lock = threading.Lock()
        self._allowed, self._promised, self._full_at = 0, 0, -PATIENCE

    def read(self, name: str, length: int, begin: int, end: int) -> bytes | None:
        """Bytes of a block of this length; None if it is not there, or damaged."""
        pages = -(-length // PAGE)
        first, last = begin // PAGE, -(-end // PAGE)
        try:
            with (self.path / name).open("rb", buffering=0) as file:
                sums = os.pread(file.fileno(), 4 * pages, 0)
                content = os.pread(file.fileno(), min(length, last * PAGE) - first * PAGE, 4 * pages + first * PAGE)
                os.utime(file.fileno())
        except OSError:
            return None
        right = len(content) >= end - first * PAGE and _sums(content) == sums[4 * first : 4 * last]
        return content[begin - first * PAGE : end - first * PAGE] if right else None

    def write(self, name: str, content: bytes) -> None:
        """Keep a block. That a disk is full costs time only. Without waiting for the disk: checksums tell."""
        temporary = self.path / f"{name}.{secrets.token_hex(4)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(_sums(content))
                file.write(content)
            os.replace(temporary, self.path / name)  # noqa: PTH105 - atomic
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def reserve(self, size: int) -> bool:
        """Whether so many bytes more may be written; what was not used since this command began makes room."""
        with self._lock:
            if self._allowed < size and time.monotonic() > self._full_at + PATIENCE:
                self._allow(size)
            if self._allowed < size:
                return False
            self._allowed -= size
            self._promised += size
            return True

    def release(self, size: int) -> None:
        """They are written, or will not be."""
        with self._lock:
            self._promised -= size

    def _allow(self, size: int) -> None:
        """Find out how much may be written before the folder is looked at again."""
        needed = size + self._promised
        room = self._forget(needed)
        room = (room if room >= needed else cache_folder.make_room(needed, self.path)) - self._promised
        self._allowed = min(MOST, max(room // SHARE, size)) if room >= size else 0
        if not self._allowed:
            self._full_at = time.monotonic()

    def _forget(self, size: int) -> int:
        """Remove blocks from before this command, the least recently used first, as long as there is no room."""
        room = cache_folder.room()
        if room >= size:
            return room
        found = []
        for file in self.path.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # removed meanwhile
                found.append((file.stat().st_mtime, file.stat().st_size, file))
        for used, taken, file in sorted(found):
            if room >= size or used >= self.since:
                break
            with suppress(OSError):
                file.unlink()
                room += taken
        return room


def pieces(begin: int, end: int) -> list[tuple[int, int, int]]:
    """Bytes of an object as blocks and the bytes of each."""
    found = []
    for number in range(begin // BLOCK, -(-end // BLOCK)):
        first = number * BLOCK
        found.append((number, max(begin - first, 0), min(end - first, BLOCK)))
    return found


def block_of(known: Known, number: int) -> tuple[str, int]:
    """What a block of an object is called, and its length."""
    name = f"{code(known.url, known.version, known.size)}-{number}{SUFFIX}"
    return name, min(BLOCK, known.size - number * BLOCK)


def _sums(content: bytes) -> bytes:
    """The checksums of pages."""
    whole = memoryview(content)
    return b"".join(crc32(whole[at : at + PAGE]).to_bytes(4, "little") for at in range(0, len(content), PAGE))


def folder_of(url: str) -> Folder | None:
    """The blocks of the objects in a folder of a store; None if nothing can be kept."""
    try:
        return _folder(str(cache_folder.cache_folder()), url)
    except OSError:
        return None


@functools.lru_cache(64)
def _folder(cache: str, url: str) -> Folder:
    path = cache_folder.opened(f"remote-{code(url)}", f"bytes of {url}")
    remove_old_temporaries(path)
    return Folder(path)
