"""Parquet files in the layout of the Hugging Face hub: a column of encoded images, optionally one of labels.

Parquet is read in row groups: for one image, its whole group is read and decompressed. Groups are cached in memory up
to a budget, so data that fit are read once, and so are images read in file order. Beyond the budget, a full shuffle
reads nearly a group per image: with groups of 100 rows, some 100 times the bytes. That takes a fraction of a
millisecond for images of 32 pixels, about 6 ms for photographs of 100 kB, more on a slow disk: for many photographs,
tar shards are the better format.
"""

import functools
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.blobs import Blob, LocalFile
from tico_ssl.data.decoding import IN_FULL, BadImage, Reading
from tico_ssl.data.formats._hub_folders import SUFFIX, chosen, holds_parquet, remote_files, split_files, splits_named
from tico_ssl.data.remote.objects import ObjectFile, RemoteObject, remote_folder, remote_objects
from tico_ssl.data.remote.urls import is_folder, is_url, name_of
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import counted

RANK = 1  # data sets distributed as folders may have tables next to their images
ENDINGS = (SUFFIX,)
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
# pyarrow's own errors, too few rows, texts that are not UTF-8, sizes that cannot be allocated
FAILURES = (ValueError, OSError, RuntimeError, IndexError, KeyError, TypeError, MemoryError)
CACHE_BYTES = 1 << 30  # of decompressed groups that a source caches per process


def matches(place: str) -> bool:
    """A parquet file, or a folder that is a parquet data set."""
    if is_url(place):
        return _holds_remote(place) if is_folder(place) else place.endswith(ENDINGS)
    path = Path(place).expanduser()
    return holds_parquet(path) if path.is_dir() else path.suffix in ENDINGS and path.is_file()


def _holds_remote(url: str) -> bool:
    """Whether a folder of a store is a parquet data set. One with other files in it is not searched further."""
    here = [blob.name for blob in remote_folder(url)]
    return any(name.endswith(ENDINGS) for name in here) or (not here and bool(remote_files(url)))


def splits(place: str) -> dict[Split, str]:
    """Those that the names of files or folders tell."""
    return {split: "" for split in get_args(Split) if split in splits_named(place)}


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Images by row groups."""
    return open_parquet(place if is_url(place) else Path(place).expanduser(), split, reading)


@dataclass(frozen=True)
class File:
    """A parquet file as its footer describes it."""

    blob: Blob
    metadata: Any
    image: str
    label: str | None
    classes: tuple[str, ...]


def open_parquet(path: Path | str, split: str = "train", reading: Reading = IN_FULL) -> Source | None:
    """Images of a .parquet file or a folder of them, by path or url. None if there is no test split.

    In a folder, files or subfolders whose names begin with train are the training split, with test or val the test
    split; without such names, and for a single file, all images are for training. There are labels if every row has
    one.
    """
    blobs = _files_at(path, split)
    if blobs is None:
        return None
    files = [describe(blob) for blob in blobs]
    reader = Reader(files, reading)
    if reader.count == 0:
        raise UserError(f"{path}: no rows in {counted(len(files), 'parquet file')}")
    names = files[0].classes if split == "train" else _training_names(path) or files[0].classes
    labels = read_labels(files, names)
    classes = names if labels is not None and int(labels.max()) < len(names) else ()
    return Source(
        name_of(str(path)) or str(path),
        reader.count,
        reader.fetch,
        labels=labels,
        classes=classes,
        names=reader.name,
        identity=reader.identity,
        content=reader.content,
    )


def _files_at(place: Path | str, split: str) -> Sequence[Blob] | None:
    """The files of a split; None if there is no test split."""
    if isinstance(place, Path):
        paths = split_files(place, split)
        return None if paths is None else [LocalFile(path) for path in paths]
    if not is_folder(place):
        return remote_objects([place]) if split == "train" else None
    if not (files := remote_files(place)):
        raise UserError(f"{place}: no .parquet files found in it or its subfolders")
    return chosen(files, split, place)


def _training_names(place: Path | str) -> tuple[str, ...]:
    """The names of the classes in the first training file; none if there are only other files."""
    with suppress(UserError):
        return describe((_files_at(place, "train") or [])[0]).classes
    return ()


class Reader:
    """Random access by row groups, thread-safe and fork-safe.

    Files are opened for each group and closed again: pyarrow's readers are not thread-safe, and opening one with a
    known footer is cheap. Threads that need the same group wait for one of them to read it. Locks and groups belong to
    a process, because a fork may inherit locked ones.
    """

    def __init__(self, files: Sequence[File], reading: Reading) -> None:
        self._files, self._reading = files, reading
        groups = [(number, group) for number, file in enumerate(files) for group in range(file.metadata.num_row_groups)]
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 2)
        rows = [files[number].metadata.row_group(group).num_rows for number, group in groups]
        self._starts = np.cumsum([0, *rows])
        self.count = int(self._starts[-1])
        self._first = np.cumsum([0, *(file.metadata.num_rows for file in files)])  # row of each file
        largest = max((files[n].metadata.row_group(group).total_byte_size for n, group in groups), default=1)
        self._cached = functools.lru_cache(max(1, CACHE_BYTES // max(1, largest)))(self._read)
        self._locks: dict[tuple[int, int], threading.Lock] = {}

    def fetch(self, place: int) -> Tensor:
        """One image; its group is read unless it is cached."""
        image, name = self._image(place)
        return self._reading.decode(image, name)

    def content(self, place: int) -> bytes:
        """The bytes of an image."""
        return self._image(place)[0]

    def _image(self, place: int) -> tuple[bytes, str]:
        """The bytes of an image, and its name."""
        group = int(np.searchsorted(self._starts, place, side="right")) - 1
        number = int(self._groups[group, 0])
        name = f"{self._files[number].blob}:{place - self._first[number]}"
        try:
            value = self._group(group)[place - int(self._starts[group])].as_py()
        except UserError:  # of a store
            raise
        except FAILURES as error:
            raise BadImage(name, _line(error)) from error
        image, original = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if image is None:
            raise BadImage(name, "no image in this row")
        return image, f"{name}:{original}" if original else name

    def name(self, place: int) -> str:
        """The file and the row in it."""
        blob, row = self._row(place)
        return f"{blob.name}:{row}"

    def identity(self, place: int) -> bytes:
        """The same, with what tells the file from one that replaces it."""
        blob, row = self._row(place)
        return blob.identity(row)

    def _row(self, place: int) -> tuple[Blob, int]:
        number = int(np.searchsorted(self._first, place, side="right")) - 1
        return self._files[number].blob, place - int(self._first[number])

    def _group(self, group: int) -> Any:
        key = os.getpid(), group
        with self._locks.setdefault(key, threading.Lock()):
            return self._cached(*key)

    def _read(self, process: int, group: int) -> Any:
        """The images of a group. The process is an argument to be part of the cache's key."""
        file = self._files[self._groups[group, 0]]
        with _opened(file.blob, file.metadata) as opened:
            return opened.read_row_group(int(self._groups[group, 1]), [file.image], use_threads=False).column(0)


def describe(blob: Blob) -> File:
    """Read the footer of a file and find its columns."""
    _parquet()
    try:
        with _opened(blob) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
    except UserError:  # of a store
        raise
    except FAILURES as error:
        raise UserError(f"{blob}: not a readable parquet file ({_line(error)})") from error
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise UserError(f"{blob}: damaged, its groups have {counted(sum(rows), 'row')} and not {metadata.num_rows}")
    if len(set(schema.names)) < len(schema.names):
        raise UserError(f"{blob}: two columns have the same name; columns: {', '.join(schema.names)}")
    image = _image_column(schema)
    if image is None:
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(f"{blob}: no column of encoded images (image, img, or a struct with bytes); columns: {columns}")
    label = next((name for name in LABEL_COLUMNS if name in schema.names and _is_whole(schema.field(name).type)), None)
    return File(blob, metadata, image, label, _class_names(schema, label))


def read_labels(files: Sequence[File], names: tuple[str, ...]) -> Tensor | None:
    """The labels of all rows as numbers of these names, if all have one. The hub marks missing labels by -1 or
    null."""
    parts = []
    for file in files:
        if file.label is None:
            return None
        try:
            with _opened(file.blob, file.metadata) as opened:
                column = opened.read([file.label], use_threads=False).column(0)
            if len(column) != file.metadata.num_rows:
                raise ValueError(f"{counted(len(column), 'label')} for {counted(file.metadata.num_rows, 'row')}")
            if column.null_count:
                return None
            parts.append(_numbered(column.to_numpy().astype(np.int64), file, names))
        except UserError:  # of a store
            raise
        except FAILURES as error:
            raise UserError(f"{file.blob}: column {file.label} cannot be read ({_line(error)})") from error
    labels = torch.from_numpy(np.concatenate(parts))
    return None if bool((labels < 0).any()) else labels


def _numbered(labels: np.ndarray, file: File, names: tuple[str, ...]) -> np.ndarray:
    """The labels of a file as numbers of these names: each file has a list of its own, which may be another one."""
    if file.classes == names or not names or not len(labels) or labels.max() >= len(file.classes):
        return labels
    place = {name: number for number, name in enumerate(names)}
    used = {int(label): file.classes[label] for label in np.unique(labels) if label >= 0}
    if unknown := [name for name in used.values() if name not in place]:
        raise UserError(f"{file.blob}: class '{printable(unknown[0])}' is none of those of the training images")
    numbers = labels.copy()
    for label, name in used.items():
        numbers[labels == label] = place[name]
    return numbers


def _image_column(schema: Any) -> str | None:
    """By name, else the only struct with bytes."""
    named = [name for name in IMAGE_COLUMNS if name in schema.names and _holds_bytes(schema.field(name).type)]
    structs = [field.name for field in schema if _is_struct(field.type) and _holds_bytes(field.type)]
    found = named[:1] or structs
    return found[0] if len(found) == 1 else None


def _holds_bytes(kind: Any) -> bool:
    if not _is_struct(kind):
        return _is_binary(kind)
    place = kind.get_field_index("bytes")
    return place >= 0 and _is_binary(kind.field(place).type)


def _is_binary(kind: Any) -> bool:
    return bool(_types().is_binary(kind) or _types().is_large_binary(kind))


def _is_struct(kind: Any) -> bool:
    return bool(_types().is_struct(kind))


def _is_whole(kind: Any) -> bool:
    return bool(_types().is_integer(kind))


def _class_names(schema: Any, label: str | None) -> tuple[str, ...]:
    """The hub's own description of the columns, if the file has a valid one."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _opened(blob: Blob, metadata: Any = None) -> Any:
    """A file. Pages that were written with checksums are verified."""
    source = ObjectFile(blob) if isinstance(blob, RemoteObject) else str(blob)
    return _parquet().ParquetFile(source, metadata=metadata, page_checksum_verification=True)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"parquet files need pyarrow: {install_command('parquet')}") from error
    return pyarrow.parquet


def _types() -> Any:
    import pyarrow.types

    return pyarrow.types


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
