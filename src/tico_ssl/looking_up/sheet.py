"""A contact sheet of queries and what was found for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tico_ssl.runtime.files import written_atomically

CELL, GAP, COLUMNS = 112, 4, 12  # pixels, pixels, images in a row beside the query


def write_sheet(path: Path, queries: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> None:
    """A PNG: each query on the left, what was found for it beside it, in rows."""
    columns = 1 + min(COLUMNS, max(map(len, found)))
    heights = [-(-len(near) // (columns - 1)) for near in found]
    sheet = np.full((sum(heights) * (CELL + GAP) - GAP, columns * (CELL + GAP) + GAP, 3), 255, dtype=np.uint8)
    row = 0
    for query, near, height in zip(queries, found, heights, strict=True):
        _draw(sheet, query, row, 0, 0)
        for number, image in enumerate(near):
            _draw(sheet, image, row + number // (columns - 1), 1 + number % (columns - 1), 2 * GAP)
        row += height
    with written_atomically(path) as temporary:
        Image.fromarray(sheet).save(temporary, "PNG")


def _draw(sheet: np.ndarray, image: np.ndarray, row: int, column: int, shift: int) -> None:
    top, left = row * (CELL + GAP), column * (CELL + GAP) + shift
    sheet[top : top + CELL, left : left + CELL] = np.asarray(Image.fromarray(image).resize((CELL, CELL)))
