"""Where a store keeps pixels: in memory that is shared with forked processes, or in a folder of the cache.

A backing takes the bytes of images and says where each is, or that there is no room; it never blocks and never fails.
"""

import mmap
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tico_ssl.runtime import cache_folder

HEAD = 64  # bytes before the first image, so that none begins at 0
FILES = 32  # processes that append at once, each to a file of its own: a file system lets one at a time write to a file
SPAN = 2**44  # of the places in one file
AT_ONCE = 256  # images that are written together
READERS, SEVERAL = 4, 2**22  # threads that read together, and from how many bytes on
PATIENCE = 1.0  # seconds for the lock: a worker may have been killed with it, and then nothing more is kept


class InMemory:
    """Up to `capacity` bytes of memory; untouched pages cost nothing."""

    name = "in memory"

    def __init__(self, capacity: int) -> None:
        self.capacity = HEAD + capacity
        self._memory = torch.frombuffer(mmap.mmap(-1, self.capacity), dtype=torch.uint8)
        self._used = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        self._used[0] = HEAD
        self._lock = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else None).Lock()

    def append(self, images: Sequence[Tensor]) -> list[int | None]:
        """Keep the bytes of images; where each begins, or None if there is no room for it."""
        return [self._append(pixels) for pixels in images]

    def _append(self, pixels: Tensor) -> int | None:
        if self._used[0] >= self.capacity:
            return None
        if not self._lock.acquire(timeout=PATIENCE):
            self._used[0] = self.capacity  # nobody waits for it again
            return None
        try:
            begin = int(self._used[0])
            if begin + len(pixels) > self.capacity:
                return None
            self._used[0] = begin + len(pixels)
        finally:
            self._lock.release()
        self._memory[begin : begin + len(pixels)] = pixels
        return begin

    def read(self, begin: int, size: int) -> Tensor | None:
        """The bytes, without a copy."""
        return self._memory[begin : begin + size]

    def read_all(self, begins: Sequence[int], sizes: Sequence[int], memory: Tensor) -> bool:
        """The bytes of several images, one after the other in `memory`; whether all are there."""
        at = 0
        for begin, size in _extents(begins, sizes):
            memory[at : at + size] = self._memory[begin : begin + size]
            at += size
        return True


RECORD = np.dtype(
    [
        ("image", "<u8", 2),
        ("begin", "<u8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("shorter", "<u4"),
        ("checksum", "<u4"),
        ("own", "<u8"),
    ]
)
"""A kept image: the digest of its identity, where its pixels are, its size, how far it was reduced (the `shorter` of
its decoding, WHOLE or ALWAYS), and checksums of its pixels and of the record up to there."""
WHOLE, ALWAYS = 0, 2**32 - 1  # a JPEG at its full size; another format, whose decoder does not reduce
OWN = RECORD.itemsize - 8  # bytes of a record that its own checksum covers


class OnDisk:
    """Files that only grow: pixels, in a file for each process that appends, and records of where each image is.
    Whoever appends writes the pixels first, so a record is right at any moment at which a process is killed, and
    several commands may append at once. Nothing is trusted without its checksum: a file may have been damaged since.

    A place is a byte in all files together, of which each has `SPAN`."""

    name = "on disk"

    def __init__(self, folder: Path, capacity: int = sys.maxsize) -> None:
        self.folder, self.capacity = folder, capacity
        self._held = cache_folder.held(folder)
        self._records = self._open("records")
        self._readable: dict[int, FileIO] = {}
        self._own = threading.local()
        if rest := os.fstat(self._records.fileno()).st_size % RECORD.itemsize:  # a full disk cut a record
            self._records.write(bytes(RECORD.itemsize - rest))

    @property
    def bytes(self) -> int:
        """Size of all pixels, also those of other sources and those that nobody will use again."""
        return sum(file.stat().st_size for file in self.folder.glob("pixels-*"))

    def close(self) -> None:
        """Use the folder no longer."""
        for file in (self._held, self._records, *self._readable.values()):
            file.close()

    def _open(self, name: str, also: int = os.O_CREAT | os.O_APPEND) -> FileIO:
        flags = os.O_RDWR | also | getattr(os, "O_BINARY", 0)
        return cache_folder.HeldFile(os.open(self.folder / name, flags, 0o600), "r+")

    def _pixels(self, number: int, also: int = os.O_CREAT | os.O_APPEND) -> FileIO:
        """A file of pixels of this folder, not of one that another command has made since this one was removed."""
        file = self._open(f"pixels-{number}", also)
        if os.fstat(self._records.fileno()).st_ino != (self.folder / "records").stat().st_ino:
            file.close()
            raise FileNotFoundError(self.folder)
        return file

    def append(self, images: Sequence[Tensor]) -> list[int | None]:
        """Keep the bytes of images; where each begins, or None if there is no room for it."""
        begins, ends = list[int | None](), np.cumsum([len(pixels) for pixels in images])
        with suppress(OSError):  # the disk is full, or the folder is gone
            number, file = self._mine()
            fitting = int(np.searchsorted(ends, self.capacity - self.bytes, side="right"))
            for first in range(0, fitting, AT_ONCE):
                part = images[first : min(fitting, first + AT_ONCE)]
                left = os.writev(file.fileno(), [pixels.numpy().data for pixels in part])
                begin = number * SPAN + file.tell() - left
                for pixels in part:  # a disk that becomes full cuts a write
                    left -= len(pixels)
                    begins.append(begin if left >= 0 else None)
                    begin += len(pixels)
        return begins + [None] * (len(images) - len(begins))

    def _mine(self) -> tuple[int, FileIO]:
        """A file of pixels for this thread alone, and its number; if others have all files, one that it shares. Opened
        here, it has a position of its own, which after a write is where that ended."""
        pid, number, file = getattr(self._own, "file", (0, 0, self._records))
        if pid != os.getpid():
            for number in range(FILES):
                file = self._pixels(number)
                if cache_folder.locked(file, alone=True):
                    break
                file.close()
            else:
                number = os.getpid() % FILES
                file = self._pixels(number)
            if os.fstat(file.fileno()).st_size == 0:
                file.write(bytes(HEAD))
            self._own.file = (os.getpid(), number, file)
        return number, file

    def note(self, records: np.ndarray) -> None:
        """Tell all others, now and later, where images are."""
        size, content = RECORD.itemsize, records.tobytes()
        records["own"] = [crc32(content[at : at + OWN]) for at in range(0, len(content), size)]
        with suppress(OSError):
            self._records.write(records.tobytes())

    def noted(self, begin: int) -> tuple[np.ndarray, int]:
        """The undamaged records from a byte on, and the byte after the last of them."""
        try:
            content = os.pread(self._records.fileno(), os.fstat(self._records.fileno()).st_size - begin, begin)
        except OSError:
            content = b""
        content = content[: len(content) - len(content) % RECORD.itemsize]
        found, size = np.frombuffer(content, RECORD), RECORD.itemsize
        own = [crc32(content[at : at + OWN]) for at in range(0, len(content), size)]
        return found[found["own"] == np.array(own, np.uint64)], begin + len(content)

    def read(self, begin: int, size: int) -> Tensor | None:
        """The bytes; None if the file ends before. A mapped file would end the process instead."""
        pixels = torch.empty(size, dtype=torch.uint8)
        return pixels if self._read(begin, pixels.numpy().data) else None

    def read_all(self, begins: Sequence[int], sizes: Sequence[int], memory: Tensor) -> bool:
        """The bytes of several images, one after the other in `memory`; whether all are there."""
        parts, at = list[tuple[int, memoryview]](), 0
        for begin, size in _extents(begins, sizes):
            parts.append((begin, memory[at : at + size].numpy().data))
            at += size
        if at < SEVERAL or len(parts) == 1:
            return all(self._read(*part) for part in parts)
        with ThreadPoolExecutor(READERS) as pool:
            return all(pool.map(self._read, *zip(*parts, strict=True)))

    def _read(self, begin: int, into: memoryview) -> bool:
        number, at = divmod(begin, SPAN)
        try:
            file = self._readable.get(number) or self._readable.setdefault(number, self._pixels(number, 0))
            return os.preadv(file.fileno(), [into], at) == len(into)
        except OSError:
            return False


def _extents(begins: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where images are and how large they are, with those as one that lie one after the other."""
    first, length = begins[0], 0
    for begin, size in zip(begins, sizes, strict=True):
        if begin != first + length:
            yield first, length
            first, length = begin, 0
        length += size
    yield first, length
