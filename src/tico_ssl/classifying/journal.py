"""Predictions on their way to a file: a line per batch, each with a checksum, so that a killed command continues."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import naming
from tico_ssl.runtime.json_lines import Line, append_json_line, sealed, unsealed


@dataclass
class Batch:
    """Predictions for the images from `begin` to `end`: a ranking of classes by file, and bad files with reasons."""

    begin: int
    end: int
    rows: list[tuple[str, list[tuple[int, float]]]]
    bad: list[tuple[str, str]]


class Journal:
    """The batches that are done; `done` is the number of images in them."""

    def __init__(self, path: Path, header: Line, anew: bool) -> None:
        """Continue a journal of the same header, or begin one. Another header is another model, or other images."""
        self.path, self.done = path, 0
        found = None if anew else next(_lines(path), None)
        if found is not None and found[0] != header:
            raise UserError(f"{path}: begun with another model, other images or another --top; --overwrite starts anew")
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with naming(path):
                append_json_line(path, sealed(header))
            return
        whole = found[1]
        for batch, end in self._batches():
            self.done, whole = batch.end, end
        with path.open("rb+") as file:
            file.truncate(whole)  # what a kill cut off

    def append(self, batch: Batch) -> None:
        """Keep a batch."""
        with naming(self.path):
            append_json_line(self.path, sealed(vars(batch)))
        self.done = batch.end

    def batches(self) -> Iterator[Batch]:
        """All that are done, one at a time."""
        return (batch for batch, _ in self._batches())

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """Whole batches that follow one another, each with the end of its line."""
        done = 0
        for number, (line, end) in enumerate(_lines(self.path)):
            if number == 0:  # the header
                continue
            batch = Batch(**line)
            if batch.begin != done:
                return
            done = batch.end
            yield batch, end


def _lines(path: Path) -> Iterator[tuple[Line, int]]:
    """Undamaged lines from the beginning, each with its end in bytes."""
    if not path.is_file():
        return
    end = 0
    with path.open("rb") as file:
        for text in file:
            end += len(text)
            try:
                line = unsealed(json.loads(text)) if text.endswith(b"\n") else None
            except (ValueError, AttributeError, RecursionError):
                line = None
            if line is None:
                return
            yield line, end
