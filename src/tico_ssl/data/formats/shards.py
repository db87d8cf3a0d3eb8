"""Tar shards in the WebDataset convention, read in any order: files, a folder of them, or a pattern.

A tar file is a chain of headers, so finding one image means reading all headers before it. Each shard is scanned once
and its index cached in a small file next to it; from then on an image is one read at a known offset, and millions of
images are shuffled fully, not within a buffer.
"""

import functools
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.blobs import Blob, Descriptor, LocalFile
from tico_ssl.data.decoding import IN_FULL, MOST_BYTES, BadImage, Reading
from tico_ssl.data.formats._tar_index import UNLABELLED, Index, load_index, split_name
from tico_ssl.data.names import SUFFIXES
from tico_ssl.data.remote.objects import Near, RemoteObject, remote_folder, remote_objects, remote_pattern
from tico_ssl.data.remote.urls import is_folder, is_pattern, is_url, name_of, parent
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

RANK = 2  # data sets distributed as folders, and parquet, may have archives next to them
ENDINGS = (".tar",)

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
OPEN_SHARDS = 256  # open file descriptors per source; the limit per process is often 1024
SCANS, REMOTE_SCANS = 4, 8  # shards indexed concurrently, which hides the latency of slow disks, and of object stores
MOST_SHARDS = 100_000
CLASS_FILE_BYTES = 1 << 24
CLASS_FILES = ("classes.txt", "classnames.txt")
BRACES = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}|\{([^{}]*,[^{}]*)\}")


def matches(place: str) -> bool:
    """A tar file, compressed or not, existing or not; a folder of uncompressed ones; or a pattern."""
    if is_url(place):
        if not is_folder(place):
            return place.endswith((*ENDINGS, *COMPRESSED))
        return any(blob.name.endswith(ENDINGS) for blob in remote_folder(place))
    path = Path(place).expanduser()
    if path.is_dir():
        return holds(path, ENDINGS)
    return path.name.endswith((*ENDINGS, *COMPRESSED)) or (bool(set("{*?[") & set(place)) and not path.exists())


def holds(folder: Path, endings: tuple[str, ...]) -> bool:
    """Whether a folder has a file with one of these suffixes, not searching subfolders."""
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(endings) for entry in entries)


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Training split only."""
    return open_shards(place, reading) if split == "train" else None


def open_shards(pattern: str, reading: Reading = IN_FULL) -> Source:
    """Images in tar files, in the order of the sorted shards; `key.jpg` with `key.cls` or `key.json` for its label.

    `pattern` is a tar file, a folder of them, a glob (`shards/*.tar`) or has braces (`train-{0000..0009}.tar`). There
    are labels if every image has one; `classes.txt` or `classnames.txt` next to the shards or one folder up names them.
    """
    remote = is_url(pattern)
    found: Sequence[Path | RemoteObject] = find_remote(pattern) if remote else find_shards(pattern)
    with ThreadPoolExecutor(REMOTE_SCANS if remote else SCANS) as pool:
        parts = list(pool.map(load_index, found))
    index = Index(*(np.concatenate(arrays) for arrays in zip(*parts)))
    if len(index.members) == 0:
        raise UserError(f"{pattern}: no images found in {counted(len(found), 'shard')} ({', '.join(sorted(SUFFIXES))})")
    opened = functools.lru_cache(OPEN_SHARDS)(Descriptor)
    shards = [LocalFile(shard, opened) if isinstance(shard, Path) else shard for shard in found]
    reader = Reader(shards, [len(part.members) for part in parts], index, reading)
    labels = torch.from_numpy(index.labels) if (index.labels != UNLABELLED).all() else None
    classes = () if labels is None else class_names(found[0], 1 + int(labels.max()))
    return Source(
        name_of(pattern) if remote else Path(pattern).name or pattern,
        len(index.members),
        reader.fetch,
        labels=labels,
        classes=classes,
        names=reader.name,
        identity=reader.identity,
        content=reader.content,
        expect=reader.expect if remote else None,
    )


def class_names(shard: Path | RemoteObject, count: int) -> tuple[str, ...]:
    """One class name per line, if there are enough; in exports of several splits the file is above their folders."""
    content = next(_class_files(shard), None)
    if content is None:
        return ()
    names = content.decode("utf-8", errors="backslashreplace").rstrip().split("\n")
    return tuple(name.strip() for name in names) if len(names) >= count else ()


def _class_files(shard: Path | RemoteObject) -> Iterator[bytes]:
    """The content of files with class names, the nearest first."""
    if isinstance(shard, RemoteObject):
        folder = parent(str(shard))
        for url in (place + name for place in dict.fromkeys((folder, parent(folder))) for name in CLASS_FILES):
            with suppress(UserError):  # there is none
                yield remote_objects([url])[0].read(0, CLASS_FILE_BYTES)
        return
    for path in (place / name for place in (shard.parent, shard.parent.parent) for name in CLASS_FILES):
        if path.is_file():
            with path.open("rb") as file:
                yield file.read(CLASS_FILE_BYTES)


class Reader:
    """Random access to indexed shards, thread-safe and fork-safe."""

    def __init__(self, shards: Sequence[Blob], counts: Sequence[int], index: Index, reading: Reading) -> None:
        self._shards, self._index, self._reading = shards, index, reading
        self._ends = np.cumsum(counts)
        self._near = Near()

    def fetch(self, place: int) -> Tensor:
        """One image: one read and one decoding."""
        return self._reading.decode(self.content(place), self._full_name(place))

    def content(self, place: int) -> bytes:
        """The bytes of an image."""
        shard, size, name = self._shard(place), int(self._index.sizes[place]), self._full_name(place)
        if size > MOST_BYTES:
            raise BadImage(name, f"{size:,} bytes")
        try:
            read = functools.partial(self._near.read, shard) if isinstance(shard, RemoteObject) else shard.read
            data = read(int(self._index.offsets[place]), size)
        except OSError as error:
            raise BadImage(name, error.strerror or "the shard cannot be read") from error
        if len(data) < size:
            raise BadImage(name, "the shard is shorter than when it was opened")
        return data

    def expect(self, places: Sequence[int]) -> None:
        """Read these images together, by requests that do not wait for each other."""
        parts = ((self._shard(i), int(self._index.offsets[i]), int(self._index.sizes[i])) for i in places)
        self._near.bring([(shard, begin, size) for shard, begin, size in parts if isinstance(shard, RemoteObject)])

    def name(self, place: int) -> str:
        """The shard and the key of an image."""
        return f"{self._shard(place).name}:{split_name(self._member(place))[0]}"

    def identity(self, place: int) -> bytes:
        """The shard, and where the image begins in it."""
        return self._shard(place).identity(int(self._index.offsets[place]))

    def _full_name(self, place: int) -> str:
        return f"{self._shard(place)}:{self._member(place)}"

    def _shard(self, place: int) -> Blob:
        return self._shards[int(np.searchsorted(self._ends, place, side="right"))]

    def _member(self, place: int) -> str:
        return bytes(self._index.members[place]).decode(errors="backslashreplace")


def find_shards(pattern: str) -> list[Path]:
    """The shards that match a pattern, sorted, without repetition."""
    literal = Path(pattern).expanduser().exists()  # a name may contain braces
    pieces = iter([pattern]) if literal else _pieces(pattern)
    return sorted({path for piece in pieces for path in _matches(piece)})  # ends at the first missing one


def find_remote(pattern: str) -> list[RemoteObject]:
    """The same in a store: objects that braces or a pattern stand for, or all shards in a folder."""
    places = list(dict.fromkeys(_pieces(pattern)))
    if is_folder(pattern):
        found = [blob for place in places for blob in remote_folder(place) if blob.name.endswith(ENDINGS)]
    elif any(map(is_pattern, places)):
        found = [blob for place in places for blob in remote_pattern(place)]
    else:
        found = remote_objects(places)
    if not found:
        raise UserError(f"{pattern}: no tar files found")
    by_url = {str(blob): blob for blob in found}
    return [by_url[url] for url in sorted(by_url)]


def _pieces(pattern: str) -> Iterator[str]:
    """What the braces of a pattern stand for, if it is not too much."""
    pieces = expand_braces(pattern)
    yield from islice(pieces, MOST_SHARDS)
    if next(pieces, None) is not None:
        raise UserError(f"{pattern}: stands for more than {MOST_SHARDS:,} files")


def expand_braces(pattern: str) -> Iterator[str]:
    """`{08..10}` and `{a,b}` as a shell expands them, any number of times."""
    found = BRACES.search(pattern)
    if found is None:
        yield pattern
        return
    first, last, words = found.groups()
    if words is not None:
        choices: Iterable[str] = words.split(",")
    else:
        padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
        width = max(len(first), len(last)) if padded else 0
        low, high = sorted((int(first), int(last)))
        choices = (str(number).zfill(width) for number in range(low, high + 1))
    before, after = pattern[: found.start()], pattern[found.end() :]
    for choice in choices:
        yield from expand_braces(before + choice + after)


def _matches(piece: str) -> list[Path]:
    path = Path(piece).expanduser()
    if path.is_file():
        return [path]
    found = list(path.iterdir()) if path.is_dir() else [Path(file) for file in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    found = [file for file in found if not file.name.startswith(".")]
    shards = [file for file in found if file.name.endswith(".tar")]
    shards = shards or [file for file in found if file.name.endswith(COMPRESSED)]  # for the error about these
    if not shards:
        raise UserError(f"{piece}: no tar files found" if path.is_dir() else f"{piece}: no such tar file")
    return shards
