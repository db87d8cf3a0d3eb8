"""A table of features as .npz, .npy, .csv, .parquet or .pt, written block by block."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from tico_ssl.features.album import Album
from tico_ssl.results.formats import safe_cell
from tico_ssl.runtime.files import written_atomically

ROWS = 4_096  # that memory holds at a time


@dataclass(frozen=True)
class Table:
    """One row of features per image of an album, mapped from the disk; `places` are the images of the rows."""

    album: Album
    places: Tensor
    features: Tensor

    @property
    def labels(self) -> Tensor | None:
        """One class per image (N), several (N, classes), or None."""
        return None if self.album.labels is None else self.album.labels[self.places]

    def texts(self, of: Callable[[int], str]) -> list[str]:
        """A text for every row."""
        return [of(place) for place in self.places.tolist()]

    def described(self, begin: int, end: int) -> dict[str, Any]:
        """The columns before the features, of some rows."""
        album, places = self.album, self.places[begin:end].tolist()
        columns: dict[str, Any] = {
            "path": [album.path(place) for place in places],
            "split": [album.split(place) for place in places],
        }
        if album.labels is None:
            return columns
        labels = album.labels[self.places[begin:end]].numpy()
        if labels.ndim == 1:
            columns["label"], columns["class"] = labels, [album.class_of(place) for place in places]
            return columns
        names = album.classes or [str(i) for i in range(labels.shape[1])]
        for name, values in zip(names, labels.T, strict=True):
            columns[f"label_{name}"] = values
        return columns

    def blocks(self) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """All rows: the columns before the features, and the features."""
        for begin in range(0, len(self.places), ROWS):
            yield self.described(begin, begin + ROWS), self.features[begin : begin + ROWS].numpy()


def write_table(table: Table, out: Path) -> None:
    """Write a table in the format of the file's ending, whole or not at all. The columns beside the features of a .npy
    file are in a .npy.csv file. Nobody else may be writing either."""
    if out.suffix == ".npy":
        with written_atomically(out.with_name(f"{out.name}.csv"), alone=True) as temporary:
            _write_csv(temporary, table, features=False)
    with written_atomically(out, alone=True) as temporary:
        WRITERS[out.suffix](temporary, table)


def _write_npz(out: Path, table: Table) -> None:
    album = table.album
    arrays: dict[str, Any] = {"names": np.array(table.texts(album.path)), "splits": np.array(table.texts(album.split))}
    if table.labels is not None:
        arrays["labels"] = table.labels.numpy()
        if table.labels.ndim == 1:
            arrays["classes"] = np.array(table.texts(album.class_of))
    with out.open("wb") as file:  # given a path, NumPy would add a suffix
        np.savez_compressed(file, **arrays, features=table.features.numpy())


def _write_npy(out: Path, table: Table) -> None:
    with out.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": tuple(table.features.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        for _, features in table.blocks():
            file.write(features.astype("<f4", copy=False).tobytes())


def _write_csv(out: Path, table: Table, features: bool = True) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        _write_lines(file, table, features)


def _write_lines(file: TextIO, table: Table, features: bool) -> None:
    writer = csv.writer(file)
    names = [f"feature_{i}" for i in range(table.features.shape[1])] if features else []
    writer.writerow(map(safe_cell, [*table.described(0, 0), *names]))
    for columns, rows in table.blocks():
        cells = [map(safe_cell, values) if isinstance(values, list) else values for values in columns.values()]
        for *known, row in zip(*cells, rows, strict=True):
            writer.writerow([*known, *row] if features else known)


def _write_parquet(out: Path, table: Table) -> None:
    import pyarrow
    import pyarrow.parquet

    def as_arrow(columns: dict[str, Any], rows: np.ndarray) -> Any:
        flat = pyarrow.array(rows.reshape(-1), pyarrow.float32())
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, table.features.shape[1])
        known = {name: _arrow_column(values) for name, values in columns.items()}
        return pyarrow.table(known | {"features": lists})

    schema = as_arrow(table.described(0, 1), table.features[:1].numpy()).schema
    with pyarrow.parquet.ParquetWriter(out, schema) as writer:
        for columns, rows in table.blocks():
            writer.write_table(as_arrow(columns, rows))


def _arrow_column(values: Sequence[Any]) -> Any:
    import pyarrow

    return pyarrow.array(values, pyarrow.string()) if isinstance(values, list) else pyarrow.array(np.array(values))


def _write_pt(out: Path, table: Table) -> None:
    album = table.album
    values: dict[str, Any] = {"paths": table.texts(album.path), "splits": table.texts(album.split)}
    if table.labels is not None:
        values |= {"labels": table.labels}
        if table.labels.ndim == 1:
            values |= {"classes": table.texts(album.class_of)}
    with out.open("wb") as file:  # given a path, torch would write the name of the temporary file
        torch.save(values | {"features": table.features}, file)


WRITERS: dict[str, Callable[[Path, Table], None]] = {
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".pt": _write_pt,
}
