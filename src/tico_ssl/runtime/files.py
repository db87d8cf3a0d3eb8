"""Atomic writes: files appear complete or not at all."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_atomically(path: Path, alone: bool = False) -> Iterator[Path]:
    """A temporary path to write to; renamed to `path` on success, removed on failure.

    Every call has a path of its own, so that several processes may write the same file. With `alone` it is always the
    same one, so that the remains of a killed process are overwritten.
    """
    temporary = path.with_name(f"{path.name}.tmp" if alone else f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)  # noqa: PTH105 - atomic
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text atomically."""
    with written_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256, which name a checkpoint in a result."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
