"""Files with several images: pages of a TIFF, frames of a DICOM file, tiles of a large image.

Of these only the sizes are read when a source is opened; a part is read when it is asked for. Parts are called
`scan.tif#3` (the third image of the file), `slide.tif@512,1024` (the tile whose upper left corner is 512 pixels from
the left and 1,024 from the top), or both.
"""

import math
import os
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tico_ssl.data import dicom, tiff
from tico_ssl.data.decoding import LARGE, PIXELS_PER_BYTE, BadImage, Part, Reading, open_file, picture_size
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say

MOST_PARTS = 10_000_000  # of all files


def find_parts(folder: Path, files: list[str], reading: Reading) -> np.ndarray | None:
    """All parts of files: file, number, top, left, height and width (0: the whole image). None if every file is a
    single image, which is known by its suffix unless it is a TIFF or DICOM file, or there may be tiles."""
    if reading.tiles is None and not any(map(holds_several, files)):
        return None
    rows = array("q")
    for place, file in enumerate(files):
        height, width, count = _size(folder / file, reading)
        tiles = boxes(height, width, reading.tiles)
        for number in range(count):
            for box in tiles:
                rows.extend((place, number, *box))
        if len(rows) > 6 * MOST_PARTS:
            raise UserError(f"{folder / file}: with the files before it, more than {MOST_PARTS:,} images or tiles")
    found = np.array(rows).reshape(-1, 6)
    if len(found) == len(files) and not found[:, 4].any():
        return None
    return _varied(folder, files, reading, found) if reading.contrast else found


def _varied(folder: Path, files: list[str], reading: Reading, rows: np.ndarray) -> np.ndarray:
    """The parts without the tiles whose values hardly vary, in comparison with those of their image."""
    kept = np.ones(len(rows), bool)
    tiled = np.flatnonzero(rows[:, 4])
    _, images = np.unique(rows[tiled, :2], axis=0, return_inverse=True)
    for places in (tiled[images == image] for image in np.unique(images)):
        means, variances = np.array([_moments(folder, files, reading, rows[place]) for place in places]).T
        readable = ~np.isnan(variances)  # others are refused later
        if readable.any():
            all_together = variances[readable].mean() + means[readable].var()
            kept[places] = ~(variances < reading.contrast**2 * all_together)
    if not kept.all():
        say(f"{folder}: left out {len(kept) - kept.sum():,} of {len(tiled):,} tiles as background (data.tile_contrast)")
    return rows[kept]


def _moments(folder: Path, files: list[str], reading: Reading, row: np.ndarray) -> tuple[float, float]:
    """Mean and variance of a tile."""
    try:
        values = reading.decode(folder / files[int(row[0])], part=part_of(row)).numpy().astype(np.float64)
        return float(values.mean()), float(values.var())
    except BadImage:
        return math.nan, math.nan


def holds_several(file: str) -> bool:
    """Whether a file may have several images, by its suffix."""
    return tiff.is_tiff(file) or dicom.is_dicom(file)


def boxes(height: int, width: int, side: int | None) -> list[tuple[int, int, int, int]]:
    """Top, left, height and width of the tiles that cover an image, those at its end moved inward so that all have the
    same size. An image that is no larger than a tile is whole."""
    if side is None or max(height, width) <= side:
        return [(0, 0, 0, 0)]
    tall, wide = min(side, height), min(side, width)
    tops, lefts = _begins(height, tall), _begins(width, wide)
    return [(top, left, tall, wide) for top in tops for left in lefts]


def _begins(whole: int, size: int) -> list[int]:
    return [min(begin, whole - size) for begin in range(0, whole, size)]


def part_of(row: np.ndarray) -> Part:
    """A row of the table as a part."""
    _, number, top, left, height, width = row.tolist()
    return Part(number, (top, left, height, width) if height else None)


def part_name(file: str, row: np.ndarray, several: bool) -> str:
    """What a part is called; `several` says that the file has more than one image."""
    _, number, top, left, height, _ = row.tolist()
    return file + (f"#{number + 1}" if several else "") + (f"@{left},{top}" if height else "")


def _size(path: Path, reading: Reading) -> tuple[int, int, int]:
    """Height, width and number of the images of a file. One that cannot be read, or claims more pixels than its bytes
    can hold, is a single image, refused later."""
    try:
        with open_file(path, path.name) as file:
            height, width, count = _size_of(file, path.name, reading)
            plausible = height * width <= max(LARGE, PIXELS_PER_BYTE * file.seek(0, os.SEEK_END))
            return (height, width, count) if plausible else (0, 0, 1)
    except Exception:
        return 0, 0, 1


def _size_of(file: BinaryIO, name: str, reading: Reading) -> tuple[int, int, int]:
    if dicom.is_dicom(name):
        return 0, 0, dicom.size_of(file)[2]
    if tiff.is_tiff(name):
        return tiff.size_of(file, reading.channels)
    return (0, 0, 1) if reading.tiles is None else (*picture_size(file), 1)
