"""Names of image files: suffixes, and compact storage of many names in two arrays.

A Python list of a million paths is a million objects, which reference counting makes every worker process copy.
"""

import os
from collections.abc import Iterable, Iterator

import numpy as np

TIFF_SUFFIXES, DICOM_SUFFIXES = (".tif", ".tiff"), (".dcm", ".dicom")
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", *TIFF_SUFFIXES, *DICOM_SUFFIXES}
ARRAY_SUFFIX = ".npy"


class Names:
    """A read-only list of file names, which may contain any bytes."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> str:
        begin = int(self._ends[place - 1]) if place else 0
        return os.fsdecode(self._bytes[begin : int(self._ends[place])].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))
