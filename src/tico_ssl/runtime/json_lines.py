"""Files with one JSON object per line: a crash can cut off the last line, but not damage the others."""

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tico_ssl.runtime.files import write_atomically

Line = dict[str, Any]


def read_json_lines(path: Path) -> list[Line]:
    """All readable lines; one that a crash cut off, or that is damaged, is skipped."""
    return [line for line in parsed_lines(path) if line is not None]


def parsed_lines(path: Path) -> list[Line | None]:
    """Every line, None for a damaged one. A line that a crash cut off, or that is being written, is skipped."""
    if not path.is_file():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    parsed = [_parsed(line) for line in lines]
    return parsed + ([found] if (found := _parsed(last)) is not None else [])


def _parsed(line: bytes) -> Line | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8
        return None
    return found if isinstance(found, dict) else None


def append_json_line(path: Path, values: Line, durable: bool = False) -> None:
    """Append one line, whole or not at all; after a line that a crash cut off, on a line of its own. `durable`: it is
    on the disk when this returns."""
    line = json.dumps(values).encode() + b"\n"
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            while line:
                line = line[file.write(line) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def sealed(values: Line) -> Line:
    """Values with a checksum, for state whose damage would otherwise be used."""
    return values | {"checksum": _checksum(values)}


def unsealed(line: Line) -> Line | None:
    """Values without their checksum; None if it does not match."""
    values = {key: value for key, value in line.items() if key != "checksum"}
    return values if line.get("checksum") == _checksum(values) else None


def _checksum(values: Line) -> int:
    return zlib.crc32(json.dumps(values).encode())


def write_json_lines(path: Path, lines: Iterable[Line]) -> None:
    """Replace the whole file, atomically."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
