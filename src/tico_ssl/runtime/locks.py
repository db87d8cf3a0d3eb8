"""Locks of folders, so that one process works in a folder at a time.

The system drops the lock of a process that has died, however it died, so there are no stale locks. Where it has no file
locks, every folder is free.
"""

import contextlib
import errno
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tico_ssl.runtime.errors import UserError

LOCK = "lock"
_held: set[Path] = set()  # a lock of this kind does not keep out its own process


class InUse(UserError):
    """Somebody else works in the folder."""


def locks_exist() -> bool:
    """Whether this system has file locks that end with their process."""
    return importlib.util.find_spec("fcntl") is not None


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Within, no other process and no other caller of this function is in the folder, which is created if needed. If
    there is one already, the refusal is raised, with the process that it is. A folder in which nothing was written is
    removed again."""
    folder.mkdir(parents=True, exist_ok=True)
    if not locks_exist():
        yield
        return
    place = folder.resolve()
    if place in _held:
        raise InUse(f"{refusal} (process {os.getpid()})")
    _held.add(place)
    try:
        with (folder / LOCK).open("ab+", buffering=0) as file:
            if not locked(file):
                file.seek(0)
                raise InUse(f"{refusal} ({file.read(200).decode(errors='replace').strip() or 'another process'})")
            _label(file, f"process {os.getpid()} on {socket.gethostname()}\n")
            try:
                yield
            finally:
                _label(file, "")
                _remove_if_empty(folder)
    finally:
        _held.discard(place)


def _remove_if_empty(folder: Path) -> None:
    """Leave no folder that has nothing but the lock. Whoever takes the lock meanwhile keeps the folder."""
    with contextlib.suppress(OSError):
        if [item.name for item in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def locked(file: IO[bytes]) -> bool:
    """Lock a file, until it is closed, unless another process has. Unlike flock, forked workers do not inherit this."""
    if not locks_exist():
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # others: a file system without locks
    return True


def _label(file: IO[bytes], text: str) -> None:
    """Say in the file who holds the lock; it holds without that, as on a full disk."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(text.encode())
