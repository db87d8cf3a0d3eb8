"""Predictions as a file: .csv, .jsonl or .parquet, a row per image. Nothing here imports torch."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tico_ssl.results.formats import require_kind, safe_cell
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

Row = list[str | float]
"""A file, and its likeliest classes, each followed by its probability."""


def require_top(top: int) -> None:
    """Refuse to name no class."""
    if top < 1:
        raise UserError(f"top is {top}: at least one class has to be named")


def columns(top: int) -> list[str]:
    """Names of the columns: file, class, probability, class_2, probability_2, ..."""
    ranks = ["", *(f"_{rank}" for rank in range(2, top + 1))]
    return ["file", *(f"{name}{rank}" for rank in ranks for name in ("class", "probability"))]


def require_table(out: Path) -> None:
    """Refuse a file whose kind cannot be written."""
    require_kind(out, WRITERS, "predictions")


def write_table(out: Path, top: int, parts: Iterable[list[Row]]) -> None:
    """Write the rows of all parts atomically, one part in memory at a time. Nobody else may be writing the file."""
    with written_atomically(out, alone=True) as temporary:
        WRITERS[out.suffix](temporary, columns(top), parts)


def _write_csv(out: Path, head: list[str], parts: Iterable[list[Row]]) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for rows in parts:
            writer.writerows(map(_cells, rows))


def _cells(row: Row) -> Iterator[str | float]:
    return (safe_cell(value) if isinstance(value, str) else value for value in row)


def _write_json_lines(out: Path, head: list[str], parts: Iterable[list[Row]]) -> None:
    with out.open("w", encoding="utf-8") as file:
        for rows in parts:
            file.writelines(json.dumps(dict(zip(head, row, strict=True))) + "\n" for row in rows)


def _write_parquet(out: Path, head: list[str], parts: Iterable[list[Row]]) -> None:
    import pyarrow
    import pyarrow.parquet

    kinds: dict[str, Any] = {"file": pyarrow.string(), "class": pyarrow.string(), "probability": pyarrow.float32()}
    schema = pyarrow.schema([(name, kinds[name.partition("_")[0]]) for name in head])
    with pyarrow.parquet.ParquetWriter(out, schema) as writer:
        for rows in parts:
            values = [[row[place] for row in rows] for place in range(len(head))]
            writer.write_table(pyarrow.table(values, schema=schema))


WRITERS: dict[str, Callable[[Path, list[str], Iterable[list[Row]]], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
