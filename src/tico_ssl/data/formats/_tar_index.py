"""Where the images of a tar file lie, found by one walk through it and kept in a small file beside it."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tico_ssl.data.names import ARRAY_SUFFIX, SUFFIXES
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

INDEX_SUFFIX = ".index.npz"
INDEX_VERSION = 1  # of the layout of an index file, so that a later one does not read it wrongly
MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # how gzip, bzip2, xz and zstandard begin
UNLABELLED = -1


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
