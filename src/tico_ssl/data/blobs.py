"""Bytes under a name that do not change while they are read: a file, or an object in a store.

Formats that read at known places (tar shards, parquet, packed files) do so through this, so that they need not know
where the bytes are.
"""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from tico_ssl.data.source import file_identity


class Blob(Protocol):
    """A file or an object. Its string is its path or url, by which messages name it."""

    name: str

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, begin: int, size: int) -> bytes:
        """Bytes from a place on; fewer where the blob ends. OSError of a file, UserError of an object."""

    def open(self) -> BinaryIO:
        """All of it as a file."""

    def identity(self, place: int | None = None) -> bytes:
        """The identity of an image at a position in it, as `Source` has it."""


class Descriptor:
    """A file that is open for reading as long as this object lives. The process is part of a cache's key, so that a
    fork opens its own."""

    def __init__(self, process: int, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


class LocalFile:
    """A file. `opened` gives descriptors, which it may keep."""

    def __init__(self, path: Path, opened: Callable[[int, Path], Descriptor] = Descriptor) -> None:
        self.path, self.name, self._opened = path, path.name, opened

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size

    def read(self, begin: int, size: int) -> bytes:
        """Bytes from a place on."""
        descriptor = self._opened(os.getpid(), self.path)  # held: another thread may evict it from a cache
        return os.pread(descriptor.number, size, begin)

    def open(self) -> BinaryIO:
        """All of it as a file."""
        return self.path.open("rb")

    def identity(self, place: int | None = None) -> bytes:
        """By path, size and time."""
        return file_identity(self.path, place)
