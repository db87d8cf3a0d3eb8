"""Positions of the images in a tar file, found in one pass and cached in a small file next to it."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tico_ssl.data.blobs import Blob, LocalFile
from tico_ssl.data.names import ARRAY_SUFFIX, SUFFIXES
from tico_ssl.data.remote.objects import RemoteObject, remote_objects
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

INDEX_SUFFIX = ".index.npz"
INDEX_VERSION = 1  # of the index file's layout
MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # magic bytes of gzip, bzip2, xz and zstandard
UNLABELLED = -1
# Largest files with a label, in bytes: a number, or the description of an image.
LABEL_BYTES = {"cls": 1 << 10, "json": 1 << 20}
# Files that hold the name or other properties of the next one, and the most bytes that those take
EXTENSIONS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
LONGEST_NAME = 1 << 16


class Index(NamedTuple):
    """Positions of the images in a shard. Arrays, which worker processes share; Python objects would be copied."""

    members: np.ndarray
    """Names of the images in the tar, as bytes: key and extension."""
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


class Member(NamedTuple):
    """A file in a tar: `folder/name.left.jpg` has the key `folder/name` and the extension `left.jpg`."""

    key: str
    extension: str
    offset: int
    size: int


def load_index(shard: Path | RemoteObject) -> Index:
    """The index of a shard: from the cache if it matches the shard, else built and, if possible, cached."""
    if isinstance(shard, RemoteObject):
        return _remote_index(shard)
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
    index = scan(LocalFile(shard))
    for place in places:
        try:
            _write_index(place, index, stamp)
            break
        except OSError:  # read-only or full: the cache only saves time
            continue
    return index


def index_places(shard: Path) -> tuple[Path, Path]:
    """Next to the shard, where others find it too; else in the user's cache, under a name unique to the folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tico-ssl"
    code = hashlib.sha256(os.fsencode(shard.resolve())).hexdigest()[:16]
    return shard.with_name(shard.name + INDEX_SUFFIX), cache / f"{shard.name}.{code}{INDEX_SUFFIX}"


def _remote_index(shard: RemoteObject) -> Index:
    """The same for an object: from the cache, from a file next to it, or by reading it, which fills the cache too."""
    place, stamp = shard.cache_path(INDEX_SUFFIX), np.array([INDEX_VERSION, shard.size])
    index = None if place is None else _read_index(place, stamp)
    if index is None:
        index = _beside(shard, stamp) or scan(shard)
        with suppress(OSError):  # the cache only saves time
            if place is not None:
                _write_index(place, index, stamp)
    return index


def _beside(shard: RemoteObject, stamp: np.ndarray) -> Index | None:
    """An index that was uploaded with the shard. One that is older may be of another shard with this name."""
    try:
        (found,) = remote_objects([f"{shard}{INDEX_SUFFIX}"])
        return None if found.modified < shard.modified else _read_index(found, stamp)
    except UserError:  # there is none
        return None


def _read_index(place: Path | RemoteObject, stamp: np.ndarray) -> Index | None:
    """An index that begins with this stamp: version, size and, of a file, time."""
    try:
        with place.open() if isinstance(place, RemoteObject) else place.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not np.array_equal(archive["stamp"][: len(stamp)], stamp):
                return None
            index = Index(*(archive[name] for name in Index._fields))
            return index if _fits(index, int(stamp[1])) else None
    except Exception:  # damaged: build it again
        return None


def _fits(index: Index, size: int) -> bool:
    """Whether an index, which may have come with the shard, describes parts of a file of this size."""
    members, offsets, sizes, labels = index
    numbers = all(array.dtype == np.int64 and array.shape == members.shape for array in (offsets, sizes, labels))
    inside = numbers and bool(((offsets >= 0) & (sizes >= 0) & (sizes <= size) & (offsets <= size - sizes)).all())
    return inside and members.ndim == 1 and members.dtype.kind == "S" and bool((labels >= UNLABELLED).all())


def _write_index(path: Path, index: Index, stamp: np.ndarray) -> None:
    """Write atomically: several processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as temporary, temporary.open("xb") as file:
        np.savez(file, stamp=stamp, **index._asdict())


def scan(shard: Blob) -> Index:
    """Scan a shard. Of several images with one key the fewest dots win (`key.png`, not `key.mask.png`), of members
    with one name the first, of labels `.cls` before `.json`."""
    images: dict[str, tuple[tuple[bool, int], Member]] = {}
    labels: dict[str, dict[str, int]] = {"cls": {}, "json": {}}
    try:
        with shard.open() as file:
            for member in _members(file, shard.size):
                key, extension, offset, size = member
                suffix = f".{extension.rpartition('.')[2].lower()}"
                if suffix in SUFFIXES or suffix == ARRAY_SUFFIX:  # an array next to an image is often something else
                    rank = suffix == ARRAY_SUFFIX, extension.count(".")
                    if key not in images or rank < images[key][0]:
                        images[key] = rank, member
                elif extension in labels and key not in labels[extension] and size <= LABEL_BYTES[extension]:
                    file.seek(offset)
                    labels[extension][key] = _label(file.read(size), extension)
    except UserError:  # of a store
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(_damage(shard, error)) from error
    members = [member for _, member in images.values()]
    return Index(
        np.array([_encoded(member) for member in members], dtype=np.bytes_),
        np.array([member.offset for member in members], dtype=np.int64),
        np.array([member.size for member in members], dtype=np.int64),
        np.array([labels["cls"].get(key, labels["json"].get(key, UNLABELLED)) for key in images], dtype=np.int64),
    )


class BoundedHeader(tarfile.TarInfo):
    """A header of a tar. Names and properties that do not fit into one are in a file before it, which tarfile would
    read into memory whatever its size."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > LONGEST_NAME:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found


def _members(file: BinaryIO, whole: int) -> Iterator[Member]:
    """The files of a tar of so many bytes, without hidden ones and those that macOS adds."""
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", tarinfo=BoundedHeader) as tar:
        while (entry := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # it would keep an object for every file of the shard
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if not entry.isreg() or any(part.startswith(".") for part in parts):
                continue
            if entry.issparse():
                raise tarfile.ReadError(f"{entry.name} is stored as a sparse file")
            if entry.offset_data + entry.size > whole:
                raise tarfile.ReadError(f"{entry.name} is cut off")
            yield Member(*split_name("/".join(parts)), entry.offset_data, entry.size)
        _check_end(file, tar.offset)


def _check_end(file: BinaryIO, offset: int) -> None:
    """A tar ends in zeros: tarfile also stops silently at a damaged header or the end of a truncated file."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"it is cut off after {offset} bytes")


def split_name(name: str) -> tuple[str, str]:
    """The key and the extension of a member, split at the first dot after the folders."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension


def _encoded(member: Member) -> bytes:
    """The name in the tar: any bytes, not always UTF-8."""
    return f"{member.key}.{member.extension}".encode(errors="surrogateescape")


def _label(text: bytes, extension: str) -> int:
    try:
        value = int(text) if extension == "cls" else json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return UNLABELLED
    return value if type(value) is int and 0 <= value < 2**63 else UNLABELLED


def _damage(shard: Blob, error: Exception) -> str:
    try:
        compressed = shard.read(0, 8).startswith(MAGIC)
    except OSError:
        return f"{shard}: cannot be read ({error})"
    if compressed:
        return f"{shard}: compressed, and only a plain tar can be read in any order: unpack it (gunzip, unzstd, ...)"
    return f"{shard}: damaged or cut off, or not a tar file ({error})"
