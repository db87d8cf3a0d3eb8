"""Text files that list the images of a data set; errors name the malformed line."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable


def read_lines(
    path: Path, pattern: re.Pattern[str], needed: str, header: str | None = None
) -> Iterator[tuple[int, Sequence[str]]]:
    """Line number and fields of every non-empty line. A generator: Places-205 has two and a half million lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = os.fsdecode(line).strip()
            if not text or (number == 1 and header and text.startswith(header)):
                continue
            match = pattern.fullmatch(text)
            if match is None:
                raise UserError(f"{path}: line {number}: needs {needed}, has '{printable(text[:80])}'")
            yield number, match.groups()


def read_json(path: Path) -> Any:
    """The content of a JSON file, whose integers are of at most 64 bits."""
    try:
        return json.loads(path.read_bytes(), parse_int=_integer)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    except OverflowError as error:
        raise UserError(f"{path}: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({type(error).__name__})") from error


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 63:
        raise OverflowError(f"has a number of {len(text)} digits, {text[:20]}...")
    return number


def require_folders(images: Path, files: list[str], listing: Path) -> None:
    """Check that all folders in a list exist. They are few; its files may be millions."""
    for folder in sorted({file.rpartition("/")[0] for file in files}):
        if not (images / folder).is_dir():
            raise UserError(f"{images / printable(folder)}: no such folder, but {listing.name} lists images in it")
