"""Images decoded once: the first pass over files keeps their pixels in memory, all others read them there.

The memory is shared with worker processes that are forked later, so whichever process decodes an image first, keeps it
for all. What does not fit is decoded every time.
"""

import mmap
import multiprocessing
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source

FREE_SHARE = 0.5  # of the memory that is free when a store is made
SPARE = 1.25  # memory for so many times the estimated size: untouched pages cost nothing
SAMPLED = 64  # images that are decoded to estimate the size of all
BEGIN, HEIGHT, WIDTH = range(3)  # columns of the index
ABSENT, BAD = 0, -1  # instead of a begin
GROUP = Path("/sys/fs/cgroup")
PATIENCE = 1.0  # seconds for the lock: a worker may have been killed while it had it, and then nothing more is kept
HEAD = 64  # bytes before the first image, so that none begins at 0


class Store:
    """The decoded images of a source, as far as they were asked for; about `expected` bytes in all."""

    def __init__(self, source: Source, channels: int, expected: int) -> None:
        self.source, self.channels, self.expected = source, channels, expected
        self.capacity = HEAD + round(SPARE * expected)
        self._memory = torch.frombuffer(mmap.mmap(-1, self.capacity), dtype=torch.uint8)
        index = np.frombuffer(mmap.mmap(-1, 8 * (3 * len(source) + 1)), np.int64)
        self._index, self._used = index[1:].reshape(len(source), 3), index[:1]
        self._used[0] = HEAD
        self._lock = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else None).Lock()

    def stored(self) -> Source:
        """The source with images from the store."""
        return replace(self.source, fetch=self.fetch)

    def fetch(self, place: int) -> Tensor:
        """An image (C, H, W), decoded if this is the first time that any process asks for it."""
        begin, height, width = self._index[place].tolist()
        if begin > 0:
            return self._memory[begin:].as_strided((self.channels, height, width), self._strides(width))
        try:
            image = self.source.fetch(place)
        except BadImage:
            self._index[place, BEGIN] = BAD
            raise
        self._keep(place, image)
        return image

    def ensure(self, place: int) -> None:
        """Decode an image if no process has yet."""
        with suppress(BadImage):
            self.fetch(place)

    @property
    def bytes(self) -> int:
        """Memory that is in use."""
        return int(self._used[0])

    def missing(self) -> list[int]:
        """The images that nobody has asked for, or that did not fit."""
        return np.flatnonzero(self._index[:, BEGIN] == ABSENT).tolist()

    def ragged(self) -> Ragged:
        """All images, if none is missing, without a copy. In place of a bad one is the next that is not, as `readable`
        has it."""
        places = np.arange(len(self.source))
        good = np.flatnonzero(self._index[:, BEGIN] > 0)
        found = good[np.searchsorted(good, places) % len(good)]
        begins, sizes = torch.from_numpy(self._index[found, BEGIN]), torch.from_numpy(self._index[found, HEIGHT:]).int()
        return Ragged(self._memory[: self.bytes], begins, sizes, self.channels, int(sizes.max()))

    def _keep(self, place: int, image: Tensor) -> None:
        begin = self._room(place, image.numel())
        if begin is None:
            return
        _, height, width = image.shape
        self._memory[begin:].as_strided(image.shape, self._strides(width)).copy_(image)
        self._index[place, HEIGHT:] = height, width
        self._index[place, BEGIN] = begin  # last: from now on other processes read it

    def _room(self, place: int, size: int) -> int | None:
        """Where an image may be kept; None if there is no room, or it is there already."""
        if not self._lock.acquire(timeout=PATIENCE):
            return None
        try:
            begin = int(self._used[0])
            if begin + size > self.capacity or self._index[place, BEGIN] > 0:
                return None
            self._used[0] = begin + size
            return begin
        finally:
            self._lock.release()

    def _strides(self, width: int) -> tuple[int, int, int]:
        """Strides of an image (C, H, W), channels last."""
        return 1, width * self.channels, self.channels


def store_for(source: Source, channels: int) -> Store | None:
    """A store for the images of a source in memory, if they are encoded and fit. Images that a caller's own code makes
    may be others each time."""
    if source.content is None:
        return None
    size = _estimated_bytes(source)
    return Store(source, channels, size) if SPARE * size < FREE_SHARE * free_memory() else None


def _estimated_bytes(source: Source) -> int:
    """All images, decoded, from a few that are evenly spaced."""
    sample, sizes = source.limited(SAMPLED), []
    for place in range(len(sample)):
        with suppress(BadImage):
            sizes.append(sample.fetch(place).numel())
    return round(len(source) * sum(sizes) / max(1, len(sizes)))


def free_memory() -> int:
    """Bytes that this process can still use: of the machine, and of its control group where that has a limit."""
    free = 0
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    with suppress(OSError, ValueError):  # no control group, or no limit ("max")
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        held = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(held.get("inactive_file", 0)))  # what is cached gives way
    return max(0, free)
