"""Files that appear whole or not at all."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: Path, alone: bool = False) -> Iterator[Path]:
    """Where to write a file, which gets its name when all of it is there; of what fails nothing is left.

    Every writer has a place of its own, so that several may write the same file. One that is `alone` has always the
    same, and writes over what was left there if it was killed.
    """
    temporary = path.with_name(f"{path.name}.tmp" if alone else f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)  # noqa: PTH105 - atomic
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """The same for a text."""
    with written_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256, which name a checkpoint in a result."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
