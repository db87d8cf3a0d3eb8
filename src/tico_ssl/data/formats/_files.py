"""Sources with one file per image."""

from pathlib import Path

from torch import Tensor

from tico_ssl.data.decoding import Reading, read_file
from tico_ssl.data.names import Names
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
