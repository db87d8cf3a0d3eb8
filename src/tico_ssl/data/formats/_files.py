"""Sources with one file per image, or several images per file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.decoding import Reading, read_file
from tico_ssl.data.names import Names
from tico_ssl.data.parts import find_parts, holds_several, part_name, part_of
from tico_ssl.data.source import Source, file_identity
from tico_ssl.runtime.printing import printable


def files_source(
    name: str,
    folder: Path,
    files: list[str],
    reading: Reading,
    labels: Tensor | None = None,
    classes: tuple[str, ...] = (),
) -> Source:
    """Files by paths relative to a folder, in the given order."""
    names = Names(files)
    if (parts := find_parts(folder, files, reading)) is not None:
        return _parts_source(name, folder, names, reading, parts, labels, classes)
    return Source(
        name,
        len(names),
        lambda i: reading.decode(folder / names[i], printable(names[i])),
        labels=labels,
        classes=classes,
        names=names.__getitem__,
        files=lambda i: folder / names[i],
        content=lambda i: read_file(folder / names[i], printable(names[i])),
        identity=lambda i: file_identity(folder / names[i]),
    )


def _parts_source(
    name: str,
    folder: Path,
    names: Names,
    reading: Reading,
    parts: np.ndarray,
    labels: Tensor | None,
    classes: tuple[str, ...],
) -> Source:
    """The parts of files, each an image with its file's label. The pixels of a part stand for its bytes: a file of a
    thousand images is not read a thousand times."""

    def path(i: int) -> Path:
        return folder / names[int(parts[i, 0])]

    several = np.bincount(parts[:, 0], parts[:, 1] > 0, len(names)) > 0

    def called(i: int) -> str:
        return part_name(names[int(parts[i, 0])], parts[i], bool(several[parts[i, 0]]))

    def fetch(i: int) -> Tensor:
        return reading.decode(path(i), printable(called(i)), part_of(parts[i]))

    def content(i: int) -> bytes:
        own = not parts[i, 4] and not holds_several(names[int(parts[i, 0])])
        return read_file(path(i), printable(called(i))) if own else b"pixels" + fetch(i).numpy().tobytes()

    return Source(
        name,
        len(parts),
        fetch,
        labels=None if labels is None else labels[torch.from_numpy(parts[:, 0])],
        classes=classes,
        names=called,
        content=content,
        identity=lambda i: file_identity(path(i)) + parts[i, 1:].tobytes(),
    )
