"""Tar shards in the WebDataset convention, read in any order.

A tar file is a chain of headers, so finding one image means walking past all before it. Each shard is walked once and
what was found is kept in a small file beside it; from then on an image is one read at a known place, and a shuffle
over millions of images is a true one, not that of a buffer.
"""

import functools
import glob
import hashlib
import json
import os
import re
import tarfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.decoding import ARRAY_SUFFIX, IN_FULL, SUFFIXES, BadImage, Reading
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

INDEX_SUFFIX = ".index.npz"
INDEX_VERSION = 1  # of the layout of an index file, so that a later one does not read it wrongly
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # how gzip, bzip2, xz and zstandard begin
OPEN_SHARDS = 256  # file descriptors that a source holds at most; a process may often have no more than 1024
SCANS = 4  # shards that are indexed at a time, which hides the latency of slow disks
UNLABELLED = -1
CLASS_FILES = ("classes.txt", "classnames.txt")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


class Index(NamedTuple):
    """Where the images of a shard lie. Arrays, because worker processes share those and would copy Python objects."""

    members: np.ndarray
    """Names of the images in the tar, as bytes: the key and the extension."""
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


class Member(NamedTuple):
    """A file in a tar: `folder/name.left.jpg` has the key `folder/name` and the extension `left.jpg`."""

    key: str
    extension: str
    offset: int
    size: int


def open_shards(pattern: str, reading: Reading = IN_FULL) -> Source:
    """Images in tar files, in the order of the sorted shards; `key.jpg` with `key.cls` or `key.json` for its label.

    `pattern` is a tar file, a folder of them, a glob (`shards/*.tar`) or has braces (`train-{0000..0009}.tar`). Labels
    exist when every image has one; `classes.txt` or `classnames.txt` beside the shards, or one folder up, names them.
    """
    paths = find_shards(pattern)
    with ThreadPoolExecutor(SCANS) as pool:
        parts = list(pool.map(load_index, paths))
    index = Index(*(np.concatenate(arrays) for arrays in zip(*parts)))
    if len(index.members) == 0:
        raise UserError(f"{pattern}: no images found in {len(paths)} shard(s) ({', '.join(sorted(SUFFIXES))})")
    reader = Reader(paths, [len(part.members) for part in parts], index, reading)
    labels = torch.from_numpy(index.labels) if (index.labels != UNLABELLED).all() else None
    classes = () if labels is None else class_names(paths[0].parent, 1 + int(labels.max()))
    name, count = Path(pattern).name or pattern, len(index.members)
    return Source(name, count, reader.fetch, labels=labels, classes=classes, names=reader.name)


def class_names(folder: Path, count: int) -> tuple[str, ...]:
    """One name a line, if there are enough; in exports of several splits the file lies above their folders."""
    for path in (place / name for place in (folder, folder.parent) for name in CLASS_FILES):
        if path.is_file():
            names = path.read_text(encoding="utf-8", errors="backslashreplace").rstrip().split("\n")
            return tuple(name.strip() for name in names) if len(names) >= count else ()
    return ()


class Reader:
    """Random access to indexed shards, from several threads at a time and in forked processes."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], index: Index, reading: Reading) -> None:
        self._paths, self._index, self._reading = paths, index, reading
        self._ends = np.cumsum(counts)
        self._open = functools.lru_cache(OPEN_SHARDS)(Descriptor)

    def fetch(self, place: int) -> Tensor:
        """One image: one read and one decoding."""
        shard, size = self._shard(place), int(self._index.sizes[place])
        name = f"{shard}:{self._member(place)}"
        try:
            descriptor = self._open(os.getpid(), shard)  # a variable, lest another thread's opening closes it meanwhile
            data = os.pread(descriptor.number, size, int(self._index.offsets[place]))
        except OSError as error:
            raise BadImage(name, error.strerror or "the shard cannot be read") from error
        if len(data) < size:
            raise BadImage(name, "the shard is shorter than when it was opened")
        return self._reading.decode(data, name)

    def name(self, place: int) -> str:
        """The shard and the key of an image."""
        return f"{self._shard(place).name}:{split_name(self._member(place))[0]}"

    def _shard(self, place: int) -> Path:
        return self._paths[int(np.searchsorted(self._ends, place, side="right"))]

    def _member(self, place: int) -> str:
        return bytes(self._index.members[place]).decode(errors="backslashreplace")


class Descriptor:
    """A file that is open for reading until nobody holds this object. The process is there to be part of a cache's key:
    a fork opens its own."""

    def __init__(self, process: int, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


def find_shards(pattern: str) -> list[Path]:
    """The shards that a pattern stands for, sorted, each once."""
    literal = Path(pattern).expanduser().exists()  # a name may hold braces
    pieces = [pattern] if literal else expand_braces(pattern)
    return sorted({path for piece in pieces for path in _matches(piece)})


def expand_braces(pattern: str) -> list[str]:
    """`{08..10}` and `{a,b}` as a shell expands them, any number of times."""
    found = BRACES.search(pattern)
    if found is None:
        return [pattern]
    first, last, words = found.groups()
    if words is not None:
        choices = words.split(",")
    else:
        padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
        width = max(len(first), len(last)) if padded else 0
        low, high = sorted((int(first), int(last)))
        choices = [str(number).zfill(width) for number in range(low, high + 1)]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [whole for choice in choices for whole in expand_braces(before + choice + after)]


def _matches(piece: str) -> list[Path]:
    path = Path(piece).expanduser()
    if path.is_file():
        return [path]
    found = list(path.iterdir()) if path.is_dir() else [Path(file) for file in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    found = [file for file in found if not file.name.startswith(".")]
    shards = [file for file in found if file.name.endswith(".tar")]
    shards = shards or [file for file in found if file.name.endswith(COMPRESSED)]  # to be told what to do about them
    if not shards:
        raise UserError(f"{piece}: no tar files found" if path.is_dir() else f"{piece}: no such tar file")
    return shards


def load_index(shard: Path) -> Index:
    """The index of a shard: read if there is one that fits the shard, else made and, where possible, kept."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror})") from error
    stamp = np.array([INDEX_VERSION, status.st_size, status.st_mtime_ns])
    places = index_places(shard)
    for place in places:
        index = _read_index(place, stamp)
        if index is not None:
            return index
    index = scan(shard)
    for place in places:
        try:
            _write_index(place, index, stamp)
            break
        except OSError:  # read-only, or full: an index saves time, and nothing else depends on it
            continue
    return index


def index_places(shard: Path) -> tuple[Path, Path]:
    """Beside the shard, where others find it too; else in the user's cache, under a name that tells folders apart."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tico-ssl"
    code = hashlib.sha256(os.fsencode(shard.resolve())).hexdigest()[:16]
    return shard.with_name(shard.name + INDEX_SUFFIX), cache / f"{shard.name}.{code}{INDEX_SUFFIX}"


def _read_index(path: Path, stamp: np.ndarray) -> Index | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if not np.array_equal(archive["stamp"], stamp):
                return None
            return Index(*(archive[name] for name in Index._fields))
    except Exception:  # whatever is wrong with it, it is made anew
        return None


def _write_index(path: Path, index: Index, stamp: np.ndarray) -> None:
    """The whole file or nothing, although several processes may write it at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as temporary, temporary.open("xb") as file:
        np.savez(file, stamp=stamp, **index._asdict())


def scan(shard: Path) -> Index:
    """Walk through a shard. Of several images of a key the plainest name counts: `key.png`, not `key.mask.png`; of
    members of the same name the first; of labels `.cls` before `.json`."""
    images: dict[str, tuple[tuple[bool, int], Member]] = {}
    labels: dict[str, dict[str, int]] = {"cls": {}, "json": {}}
    try:
        with shard.open("rb") as file:
            for member in _members(shard):
                key, extension, offset, size = member
                suffix = f".{extension.rpartition('.')[2].lower()}"
                if suffix in SUFFIXES or suffix == ARRAY_SUFFIX:  # an array beside an image is often something else
                    rank = suffix == ARRAY_SUFFIX, extension.count(".")
                    if key not in images or rank < images[key][0]:
                        images[key] = rank, member
                elif extension in labels and key not in labels[extension]:
                    labels[extension][key] = _label(os.pread(file.fileno(), size, offset), extension)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise UserError(_damage(shard, error)) from error
    members = [member for _, member in images.values()]
    return Index(
        np.array([_encoded(member) for member in members], dtype=np.bytes_),
        np.array([member.offset for member in members], dtype=np.int64),
        np.array([member.size for member in members], dtype=np.int64),
        np.array([labels["cls"].get(key, labels["json"].get(key, UNLABELLED)) for key in images], dtype=np.int64),
    )


def _members(shard: Path) -> Iterator[Member]:
    """The files of a tar, but for hidden ones and those that macOS adds."""
    with tarfile.open(shard, "r:", encoding="utf-8") as tar:
        while (entry := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # it would hold an object for every file of the shard
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if not entry.isreg() or any(part.startswith(".") for part in parts):
                continue
            if entry.issparse():
                raise tarfile.ReadError(f"{entry.name} is stored as a sparse file")
            yield Member(*split_name("/".join(parts)), entry.offset_data, entry.size)
        _check_end(shard, tar.offset)


def _check_end(shard: Path, offset: int) -> None:
    """Only zeros end a tar: tarfile also stops, without a word, where a header is damaged or the file is cut off."""
    with shard.open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it breaks off after {offset} bytes")


def split_name(name: str) -> tuple[str, str]:
    """The key and the extension of a member, split at the first dot after the folders."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension


def _encoded(member: Member) -> bytes:
    """The name as it is in the tar: any bytes, not always UTF-8."""
    return f"{member.key}.{member.extension}".encode(errors="surrogateescape")


def _label(text: bytes, extension: str) -> int:
    try:
        value = int(text) if extension == "cls" else json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return UNLABELLED
    return value if type(value) is int and 0 <= value < 2**63 else UNLABELLED


def _damage(shard: Path, error: Exception) -> str:
    try:
        with shard.open("rb") as file:
            compressed = file.read(8).startswith(MAGIC)
    except OSError:
        return f"{shard}: cannot be read ({error})"
    if compressed:
        return f"{shard}: compressed, and only a plain tar can be read in any order: unpack it (gunzip, unzstd, ...)"
    return f"{shard}: damaged or cut off, or not a tar file ({error})"
