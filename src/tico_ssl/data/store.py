"""Images decoded once: the first pass over files keeps their pixels, all others read them there.

Pixels are kept in a folder of the cache, where later commands and other runs find them, or in memory that is shared
with worker processes. Whichever process decodes an image first, keeps it for all. What does not fit is decoded every
time. An image is known by its file's path, size and time, so a changed file is another image.
"""

import hashlib
import mmap
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.backing import ALWAYS, RECORD, WHOLE, InMemory, OnDisk
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.headers import JPEG
from tico_ssl.data.plain import jpeg_frame
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source

SAMPLED = 32  # images that are decoded to estimate the size of all
PIECE = 2**26  # bytes that are moved to a device at a time
BEGIN, HEIGHT, WIDTH, CHECKSUM = range(4)  # columns of the table
TOGETHER = 2**25  # bytes after which images that are decoded together are kept
PATIENCE = 1.0  # seconds between two looks for what other commands have kept
ABSENT, BAD = 0, -1  # instead of a begin
TRUSTED = -1  # instead of a checksum: verified, or kept by this command


class Store:
    """The decoded images of a source, as far as they were asked for.

    The table says where each image is; forked processes share it. All images take about `expected` bytes. `shorter` is
    that of the source's reading: an image that was reduced for another one is used only if this one would have got the
    same pixels.
    """

    def __init__(
        self,
        source: Source,
        channels: int,
        backing: InMemory | OnDisk,
        shorter: int | None = None,
        fill: bool = True,
        expected: int | None = None,
    ) -> None:
        self.source, self.channels, self.backing, self.shorter, self.fill = source, channels, backing, shorter, fill
        self._table = _shared(len(source), 4)
        self._refused = _shared(1, 1)
        self._seen, self._looked = 0, 0.0  # bytes of the records that were read, and when
        if isinstance(backing, OnDisk):
            digests = b"".join(_digest(source, place) for place in range(len(source)))
            self._images = np.frombuffer(digests, np.uint64).reshape(-1, 2)
            self._order = np.argsort(self._images[:, 0])
            self._learn(now=True)
        self.found = self.count  # kept by earlier commands
        if expected is None:
            expected = round(self.bytes * len(source) / self.found) if self.found else estimated_bytes(self.stored())
        self.expected = expected

    def stored(self) -> Source:
        """The source with images from the store."""
        expect = self.source.expect
        absent = None if expect is None else lambda some: expect([i for i in some if self._table[i, BEGIN] == ABSENT])
        return replace(self.source, fetch=self.fetch, expect=absent)

    def fetch(self, place: int) -> Tensor:
        """An image (C, H, W), decoded if this is the first time that anybody asks for it."""
        if (image := self._found(place)) is None:
            image = self._decoded(place)
            self._keep([(place, image)])
        return image

    def ensure(self, place: int) -> None:
        """Decode an image if nobody has yet."""
        self.ensure_all([place])

    def ensure_all(self, places: Iterable[int]) -> None:
        """The same for several, which are kept together: one large write is faster than many."""
        made, size = list[tuple[int, Tensor]](), 0
        for place in places:
            if self._trusted(place) or self._found(place) is not None:
                continue
            with suppress(BadImage):
                made.append((place, self._decoded(place)))
                size += made[-1][1].numel()
            if size > TOGETHER:
                self._keep(made)
                made, size = [], 0
        self._keep(made)

    def together(self, places: Sequence[int], pinned: bool = False) -> Ragged | None:
        """Images in one piece of memory, page-locked for a GPU if asked for; None unless all of them are kept, and
        known to be undamaged."""
        if not self._trusted(places):
            return None
        begins, sizes = self._table[places, BEGIN], torch.from_numpy(self._table[places, HEIGHT : WIDTH + 1])
        lengths = sizes.prod(dim=1) * self.channels
        memory = torch.empty(int(lengths.sum()), dtype=torch.uint8, pin_memory=pinned)
        if not self.backing.read_all(begins.tolist(), lengths.tolist(), memory):
            return None
        return Ragged(memory, lengths.cumsum(0) - lengths, sizes.int(), self.channels, int(sizes.max()))

    @property
    def count(self) -> int:
        """Number of images that are kept."""
        return int((self._table[:, BEGIN] > 0).sum())

    @property
    def bytes(self) -> int:
        """Their size."""
        kept = self._table[self._table[:, BEGIN] > 0]
        return int((kept[:, HEIGHT] * kept[:, WIDTH]).sum()) * self.channels

    @property
    def refused(self) -> int:
        """How often there was no room for an image."""
        return int(self._refused[0, 0])

    def described(self) -> str:
        """In a few words, how much is kept where."""
        there = f", {self.found:,} of {len(self.source):,} there already" if self.found else ""
        return f"about {self.expected / 1e9:.2g} GB {self.backing.name}{there}"

    def missing(self) -> list[int]:
        """The images that nobody has asked for, that did not fit, or that are not verified yet."""
        self._learn(now=True)
        begin, checksum = self._table[:, BEGIN], self._table[:, CHECKSUM]
        return np.flatnonzero((begin == ABSENT) | ((begin > 0) & (checksum != TRUSTED))).tolist()

    def ragged(self, device: torch.device) -> Ragged:
        """All images on a device, if none is missing. In place of a bad one is the next that is not, as `readable` has
        it."""
        good = np.flatnonzero(self._table[:, BEGIN] > 0)
        sizes = torch.from_numpy(self._table[good, HEIGHT : WIDTH + 1])
        lengths = sizes.prod(dim=1) * self.channels
        ends = lengths.cumsum(0)
        memory = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
        at_once, begin = max(1, PIECE // int(lengths.max())), 0
        for first in range(0, len(good), at_once):
            places = good[first : first + at_once].tolist()
            images = self.together(places, device.type == "cuda") or Ragged.of([self.fetch(place) for place in places])
            memory[begin : begin + len(images.memory)] = images.memory.to(device)
            begin += len(images.memory)
        found = torch.from_numpy(np.searchsorted(good, np.arange(len(self.source))) % len(good))
        begins, sizes = (ends - lengths)[found], sizes[found].int()
        return Ragged(memory, begins.to(device), sizes.to(device), self.channels, int(sizes.max()))

    def _trusted(self, places: int | Sequence[int]) -> bool:
        """Whether images are kept, and known to be undamaged."""
        kept = (self._table[places, BEGIN] > 0) & (self._table[places, CHECKSUM] == TRUSTED)
        return bool(np.all(kept))

    def _found(self, place: int) -> Tensor | None:
        """A kept image; perhaps another command has kept it meanwhile."""
        if (image := self._kept(place)) is None and self._learn():
            image = self._kept(place)
        return image

    def _decoded(self, place: int) -> Tensor:
        try:
            return self.source.fetch(place)
        except BadImage:
            self._table[place, BEGIN] = BAD
            raise

    def _kept(self, place: int) -> Tensor | None:
        """A kept image, unless it is damaged: then it is as if it had never been kept."""
        begin, height, width, checksum = self._table[place].tolist()
        if begin <= 0:
            return None
        pixels = self.backing.read(begin, height * width * self.channels)
        if pixels is not None and checksum != TRUSTED and crc32(pixels.numpy().data) == checksum:
            self._table[place, CHECKSUM] = checksum = TRUSTED
        if pixels is None or checksum != TRUSTED:
            self._table[place, BEGIN] = ABSENT
            return None
        return pixels.view(height, width, self.channels).permute(2, 0, 1)

    def _keep(self, made: Sequence[tuple[int, Tensor]]) -> None:
        if not self.fill or not made:
            return
        pixels = [image.permute(1, 2, 0).reshape(-1) for _, image in made]
        begins = self.backing.append(pixels)
        kept = [(*one, begin, flat) for one, begin, flat in zip(made, begins, pixels, strict=True) if begin is not None]
        self._refused[0, 0] += len(made) - len(kept)
        if isinstance(self.backing, OnDisk) and kept:
            records = [
                (
                    self._images[place],
                    begin,
                    *image.shape[1:],
                    self._reduced(place, image),
                    crc32(flat.numpy().data),
                    0,
                )
                for place, image, begin, flat in kept
            ]
            self.backing.note(np.array(records, RECORD))
        for place, image, begin, _ in kept:
            self._table[place, HEIGHT:] = *image.shape[1:], TRUSTED
            self._table[place, BEGIN] = begin  # last: from now on other processes read it

    def _reduced(self, place: int, image: Tensor) -> int:
        """How far an image was reduced, as a record has it."""
        assert self.source.content is not None
        content = self.source.content(place)
        if content[:3] != JPEG:
            return ALWAYS
        frame = jpeg_frame(content)
        whole = self.shorter is None or (frame is not None and min(frame[:2]) == min(image.shape[1:]))
        return WHOLE if whole else self.shorter or WHOLE

    def _learn(self, now: bool = False) -> bool:
        """Look, now or once in a while, for what other commands have kept; whether there was anything of ours."""
        if not isinstance(self.backing, OnDisk) or not (now or time.monotonic() > self._looked + PATIENCE):
            return False
        records, self._seen = self.backing.noted(self._seen)
        self._looked = time.monotonic()
        records = records[_same_pixels(records, self.shorter)]
        at = np.searchsorted(self._images[:, 0], records["image"][:, 0], sorter=self._order)
        places = self._order[at.clip(max=len(self.source) - 1)]
        new = (self._images[places] == records["image"]).all(axis=1) & (self._table[places, BEGIN] <= 0)
        places, records = places[new], records[new]  # of several records of an image, the last one remains
        for column, name in ((HEIGHT, "height"), (WIDTH, "width"), (CHECKSUM, "checksum"), (BEGIN, "begin")):
            self._table[places, column] = records[name]
        return len(places) > 0


def _shared(rows: int, columns: int) -> np.ndarray:
    """Whole numbers, zero at first, that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, 8 * rows * columns), np.int64).reshape(rows, columns)


def _digest(source: Source, place: int) -> bytes:
    assert source.identity is not None
    return hashlib.blake2b(source.identity(place), digest_size=16).digest()


def _same_pixels(records: np.ndarray, shorter: int | None) -> np.ndarray:
    """Which images would be decoded to the same pixels with `shorter`.

    A decoder divides a JPEG's sides by the largest of 1, 2, 4 and 8 that leaves at least `shorter` pixels. So a whole
    one is the same for all that leaves it whole, and a reduced one for all that is less than its shorter side and more
    than half of that."""
    wanted, side = shorter or np.inf, np.minimum(records["height"], records["width"]).astype(np.int64)
    kind = records["shorter"]
    same: np.ndarray = (kind == ALWAYS) | (kind == wanted) | ((2 * wanted > side) & ((kind == WHOLE) | (wanted < side)))
    return same


def estimated_bytes(source: Source) -> int:
    """All images, decoded, from a few that are spread evenly."""
    sample, sizes = source.limited(SAMPLED), []
    for place in range(len(sample)):
        with suppress(BadImage):
            sizes.append(sample.fetch(place).numel())
    return round(len(source) * sum(sizes) / max(1, len(sizes)))
