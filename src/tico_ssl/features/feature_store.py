"""Features on disk, appended block by block, so that their number is not limited by memory and a killed command loses
at most a block.

A folder with the rows as raw float32, and a journal: a line that says what they are the features of, then one for every
block with its checksum. When the folder is opened again, blocks are verified; from the first that is damaged on,
features are computed again, in the same batches as before, so that they are the same to the bit.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.data.bad_files import reason_unread
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.features.album import Album
from tico_ssl.features.batches import BATCH, own_share
from tico_ssl.features.extraction import feature_batches, in_order, require_finite
from tico_ssl.features.lazy import described, memory_of, weights_digest
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import naming
from tico_ssl.runtime.json_lines import Line, append_json_line, parsed_lines, sealed, unsealed, write_json_lines
from tico_ssl.runtime.locks import alone_in
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

BLOCK = 8 * BATCH  # images between two writes: what memory holds, and what a killed command computes again
VERSION = 1  # of the content: raise it when the same key would mean other features
FLOAT = 4  # bytes


class FeatureStore:
    """The rows of a folder. Of the first `done` images each has a row, in order, except those in `bad`."""

    def __init__(self, folder: Path, key: str, width: int) -> None:
        self.folder, self.width = folder, width
        self.done, self.rows = 0, 0
        self.bad: dict[int, str] = {}
        """Images that cannot be read, and why."""
        self._head: Line = {"key": key, "width": width}
        self._rows, self._journal = folder / "rows.f32", folder / "journal.jsonl"
        self._resume()

    def append(self, features: Tensor, bad: dict[int, str], done: int) -> None:
        """Add the rows of the images up to `done`; they are on the disk when this returns."""
        content = memory_of(features)
        if not self._journal.is_file():
            append_json_line(self._journal, sealed(self._head))
        with self._rows.open("r+b" if self._rows.is_file() else "wb") as file:
            file.seek(self.rows * self.width * FLOAT)
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        block = {"done": done, "rows": len(features), "checksum_of_rows": zlib.crc32(content), "bad": [*bad.items()]}
        append_json_line(self._journal, sealed(json.loads(json.dumps(block))), durable=True)
        self._count(block)

    def matrix(self) -> Tensor:
        """All rows (n, width), mapped from the disk."""
        if not self.rows:
            return torch.zeros(0, self.width)
        return torch.from_numpy(np.memmap(self._rows, np.float32, "c", shape=(self.rows, self.width)))

    def places(self) -> Tensor:
        """The image of each row."""
        readable = torch.ones(self.done, dtype=torch.bool)
        readable[list(self.bad)] = False
        return readable.nonzero().ravel()

    def clear(self) -> None:
        """Remove everything."""
        self._journal.unlink(missing_ok=True)
        self._rows.unlink(missing_ok=True)
        self.done, self.rows, self.bad = 0, 0, {}

    def _resume(self) -> None:
        lines = parsed_lines(self._journal)
        if not lines or not self._rows.is_file() or lines[0] is None or unsealed(lines[0]) != self._head:
            self.clear()
            return
        whole: list[Line] = [lines[0]]
        with self._rows.open("rb") as file:
            for line in lines[1:]:
                if line is None or (block := unsealed(line)) is None or not self._holds(file, block):
                    break
                self._count(block)
                whole.append(line)
        if len(whole) < len(lines):
            write_json_lines(self._journal, whole)

    def _holds(self, file: IO[bytes], block: Line) -> bool:
        size = block["rows"] * self.width * FLOAT
        content = file.read(size)
        return len(content) == size and bool(zlib.crc32(content) == block["checksum_of_rows"])

    def _count(self, block: Line) -> None:
        self.done = block["done"]
        self.rows += block["rows"]
        self.bad |= {int(place): str(reason) for place, reason in block["bad"]}


@contextmanager
def opened_store(folder: Path, key: str, width: int) -> Iterator[FeatureStore]:
    """A store that no other command writes meanwhile. Nothing is left of one without a whole block."""
    with alone_in(folder, f"{folder}: another command computes these features"):
        store = FeatureStore(folder, key, width)
        try:
            yield store
        finally:
            if not store.done:
                store.clear()


def store_key(backbone: Backbone, images: str | None, device: torch.device, dtype: torch.dtype, unit: bool) -> str:
    """A digest of everything that determines features: weights, images, device and precision. Images that cannot be
    recognised have a key that nothing else has."""
    seen = images or os.urandom(8).hex()
    made = [VERSION, weights_digest(backbone), described(backbone), seen, device.type, str(dtype), unit]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]


def fill(
    store: FeatureStore | None,
    album: Album,
    backbone: Backbone,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    unit: bool = False,
    label: str | None = "embedding",
) -> None:
    """Compute the features that are missing; `unit`: each divided by its length. Of several processes each computes a
    share, and the main one has the store."""
    if store is not None and _readable_again(album, store.bad):
        say("an image that could not be read before can be read now, so features are computed again")
        store.clear()
    begun, rows = distributed.everyone((0, 0) if store is None else (store.done, store.rows))[0]
    if 0 < begun < len(album) and label:
        say(f"continuing after {begun:,} of {counted(len(album), 'image')}")
    for part, end in zip(album.parts, album.ends, strict=True):
        offset = max(begun, end - len(part.source))
        if offset >= end:
            continue
        source = part.source if offset == end - len(part.source) else _last(part.source, end - offset)
        for block in _blocks(backbone, source, device, dtype, label):
            require_finite(backbone, block.features)
            rows += len(block.features)
            if store is not None:
                unread = sorted(set(range(block.begin, block.end)) - set(block.places.tolist()))
                bad = {offset + place: reason_unread(source, place) for place in unread}
                features = F.normalize(block.features, dim=1) if unit else block.features
                with naming(store.folder):
                    store.append(features, bad, offset + block.end)
    if not rows:
        raise UserError(f"{album.parts[0].source.name}: none of the {counted(len(album), 'image')} can be read")


def _readable_again(album: Album, bad: Iterable[int]) -> bool:
    """Whether one of these images can be read by now: an error of a network drive, for one, passes."""
    for place in bad:
        with suppress(BadImage):
            album.fetch(place)
            return True
    return False


def _last(source: Source, count: int) -> Source:
    return source.subset(torch.arange(len(source) - count, len(source)))


class _Block(NamedTuple):
    """Features of the images from `begin` to `end` on the CPU, and the images' indices; some may be unreadable."""

    begin: int
    end: int
    features: Tensor
    places: Tensor


def _blocks(
    backbone: Backbone, source: Source, device: torch.device, dtype: torch.dtype, label: str | None
) -> Iterator[_Block]:
    """One block of images after the other, to which every process contributes BLOCK images. Blocks end where batches
    do: a network may round differently in a batch of another size."""
    share, mine = own_share(source)
    batches = feature_batches([backbone], share, device, label, dtype=dtype)
    groups = groupby(batches, key=lambda batch: batch[1][0] // BLOCK)
    group = next(groups, None)
    step = BLOCK * distributed.world_size()
    for number, begin in enumerate(range(0, len(source), step)):
        rows, places = [torch.empty(0, backbone.width)], list[int]()
        if group is not None and group[0] == number:  # else none of its images can be read
            for (features,), at in group[1]:
                rows.append(features.float())
                places += at
            group = next(groups, None)
        own = torch.cat([part.cpu() for part in rows])
        yield _Block(begin, min(begin + step, len(source)), *in_order(own, mine[places]))
