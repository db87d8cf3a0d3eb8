"""A text file with one image path per line."""

import os
from pathlib import Path

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

ENDINGS = (".txt",)


def matches(place: str) -> bool:
    """A text file."""
    path = Path(place).expanduser()
    return path.suffix in ENDINGS and path.is_file()


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Training split only."""
    return open_list(Path(place).expanduser(), reading) if split == "train" else None


def open_list(path: Path, reading: Reading = IN_FULL) -> Source:
    """The files listed in a text file, one per line, relative to it; empty lines and comments (#) are skipped."""
    lines = [os.fsdecode(line.strip()) for line in path.read_bytes().splitlines()]
    files = [line for line in lines if line and not line.startswith("#")]
    missing = next((file for file in files if not (path.parent / file).exists()), None)
    if missing is not None:
        raise UserError(f"{path}: lists a file that does not exist: {printable(missing)}")
    return files_source(path.name, path.parent, files, reading)
