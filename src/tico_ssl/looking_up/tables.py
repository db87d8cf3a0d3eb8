"""Tables of file names with scores."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tico_ssl.results.formats import safe_cell
from tico_ssl.runtime.files import written_atomically


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[str | float]]) -> None:
    """A line per row; a text that a spreadsheet would take for a formula has an apostrophe before it."""
    with written_atomically(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for row in rows:
            writer.writerow([safe_cell(cell) if isinstance(cell, str) else _number(cell) for cell in row])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"
