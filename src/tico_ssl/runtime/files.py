"""Atomic writes: files appear complete or not at all, also after a power failure."""

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

OLD = 3600.0  # seconds without a change, of a temporary file that nobody will finish
SEAL = 64  # bytes at the end of a sealed file


@contextmanager
def written_atomically(path: Path, alone: bool = False) -> Iterator[Path]:
    """A temporary path to write to; renamed to `path` on success, removed on failure. The file is on the disk before it
    gets its name, and the name is before this returns.

    Every call has a path of its own, so that several processes may write the same file. With `alone` it is always the
    same one, so that the remains of a killed process are overwritten. A device is refused: root would replace it.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "exists and is not a regular file", str(path))
    temporary = path.with_name(f"{path.name}.tmp" if alone else f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)  # noqa: PTH105 - atomic
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_together(*paths: Path) -> Iterator[list[Path]]:
    """Temporary paths of files that belong together, renamed in this order once all of them are on the disk: unless all
    can be written, none is changed."""
    with ExitStack() as stack:
        temporaries = [stack.enter_context(written_atomically(path)) for path in reversed(paths)][::-1]
        yield temporaries
        for path, temporary in zip(paths, temporaries, strict=True):
            with naming(path):
                sync(temporary)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within, an error of the system names this file unless it names one: writes do not say what they failed on."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # a folder cannot be opened there
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not know this for folders
            raise
    finally:
        os.close(opened)


def remove_temporaries(path: Path) -> None:
    """Remove what killed processes left of writing this file. Nobody else may be writing it."""
    for temporary in path.parent.glob(f"{path.name}*.tmp"):
        temporary.unlink(missing_ok=True)


def remove_old_temporaries(folder: Path) -> None:
    """The same in a folder where others may be writing, also of safetensors, which has temporary files of its own: what
    is older than a write can take."""
    for pattern in ("*.tmp", ".tmp??????"):
        for temporary in folder.glob(pattern):
            with suppress(OSError):  # removed meanwhile
                if time.time() - temporary.stat().st_mtime > OLD:
                    temporary.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a text atomically. What is not UTF-8 in it, such as a name in a damaged file, is written as escapes."""
    with written_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def seal(path: Path) -> None:
    """Append the digest of a file to it, where formats that are read by their ends, as ZIP is, do not mind it."""
    with path.open("rb+") as file:
        found = _digest(file, path.stat().st_size)
        file.write(found)


def is_sealed(path: Path) -> bool:
    """Whether a file is what it was when it was sealed, to the bit."""
    with path.open("rb") as file:
        found = _digest(file, path.stat().st_size - SEAL)
        return file.read() == found


def _digest(file: IO[bytes], size: int) -> bytes:
    """The digest of the next bytes of a file."""
    found = hashlib.sha256()
    while size > 0 and (part := file.read(min(size, 2**20))):
        found.update(part)
        size -= len(part)
    return found.hexdigest().encode()


def digest(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256, which name a checkpoint in a result."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
