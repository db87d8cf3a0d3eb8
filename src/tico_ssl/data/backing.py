"""Where a store keeps pixels: in memory that is shared with forked processes, or in a folder of the cache.

A backing takes bytes and says where they are, or that there is no room; it never blocks and never fails.
"""

import mmap
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tico_ssl.runtime import cache_folder

HEAD = 64  # bytes before the first image, so that none begins at 0
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

    def append(self, pixels: Tensor) -> int | None:
        """Keep bytes; where they begin, or None if there is no room."""
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
    """Two files that only grow: pixels, and records of where each image is. Whoever appends writes the pixels first, so
    a record is right at any moment at which a process is killed, and several commands may append at once. Nothing is
    trusted without its checksum: a file may have been damaged since."""

    name = "on disk"

    def __init__(self, folder: Path, capacity: int = sys.maxsize) -> None:
        self.folder, self.capacity = folder, capacity
        self._held = cache_folder.held(folder)
        self._pixels = self._open("pixels")
        self._records = self._open("records")
        self._inode = os.fstat(self._pixels.fileno()).st_ino
        self._own = threading.local()
        if self.bytes == 0:
            self._pixels.write(bytes(HEAD))
        if rest := os.fstat(self._records.fileno()).st_size % RECORD.itemsize:  # a full disk cut a record
            self._records.write(bytes(RECORD.itemsize - rest))

    @property
    def bytes(self) -> int:
        """Size of all pixels, also those of other sources and those that nobody will use again."""
        return os.fstat(self._pixels.fileno()).st_size

    def close(self) -> None:
        """Use the folder no longer."""
        for file in (self._held, self._pixels, self._records):
            file.close()

    def _open(self, name: str) -> FileIO:
        path = self.folder / name
        return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600), "r+")

    def append(self, pixels: Tensor) -> int | None:
        """Keep bytes; where they begin, or None if there is no room."""
        try:
            file = self._mine()
            if os.fstat(file.fileno()).st_size + len(pixels) > self.capacity:
                return None
            written = file.write(pixels.numpy().data)
            return file.tell() - written if written == len(pixels) else None
        except OSError:  # the disk is full, or the folder is gone
            return None

    def _mine(self) -> FileIO:
        """The pixels as a file of this thread alone: then its position after a write is where that write ended."""
        pid, file = getattr(self._own, "file", (0, self._pixels))
        if pid != os.getpid():
            file = self._open("pixels")
            if os.fstat(file.fileno()).st_ino != self._inode:
                raise FileNotFoundError(self.folder)  # removed, and made again by another command
            self._own.file = (os.getpid(), file)
        return file

    def note(self, record: np.ndarray) -> None:
        """Tell all others, now and later, where an image is."""
        record["own"] = crc32(record.tobytes()[:OWN])
        with suppress(OSError):
            self._records.write(record.tobytes())

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
        try:
            return pixels if os.preadv(self._pixels.fileno(), [pixels.numpy().data], begin) == size else None
        except OSError:
            return None
