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


class Lock:
    """The lock of a folder, which this process takes; if another one has it, the refusal is raised, with the process
    that it is."""

    def __init__(self, folder: Path, refusal: str) -> None:
        self.folder, self._refusal = folder, refusal
        self._file: IO[bytes] | None = None
        self.take()

    def is_lost(self) -> bool:
        """Whether the folder is no longer in its place, where another process could lock what is there now."""
        try:
            return self._file is None or not os.path.samestat(
                os.fstat(self._file.fileno()), (self.folder / LOCK).stat()
            )
        except (FileNotFoundError, NotADirectoryError):
            return True

    def take(self) -> None:
        """Lock the folder that is in the place now, and create it if there is none."""
        while self.is_lost():  # also if the file was removed before it was locked
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / LOCK).open("ab+", buffering=0)
            if not locked(file):
                with file:
                    file.seek(0)
                    holder = file.read(200).decode(errors="replace").strip() or "another process"
                raise InUse(f"{self._refusal} ({holder})")
            self.release()
            _label(file, f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file = file

    def release(self) -> None:
        """Let others in."""
        if self._file is not None:
            _label(self._file, "")
            self._file.close()
            self._file = None


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[Lock | None]:
    """Within, no other process and no other caller of this function is in the folder, which is created if needed. If
    there is one already, the refusal is raised. A folder in which nothing was written is removed again. The lock can be
    asked whether the folder is still in its place; None where the system has no locks."""
    folder.mkdir(parents=True, exist_ok=True)
    if not locks_exist():
        yield None
        return
    place = folder.resolve()
    if place in _held:
        raise InUse(f"{refusal} (process {os.getpid()})")
    _held.add(place)
    try:
        lock = Lock(folder, refusal)
        try:
            yield lock
        finally:
            _remove_if_empty(lock)
            lock.release()
    finally:
        _held.discard(place)


def _remove_if_empty(lock: Lock) -> None:
    """Leave no folder that has nothing but the lock. Whoever takes the lock meanwhile keeps the folder."""
    with contextlib.suppress(OSError):
        if not lock.is_lost() and [item.name for item in lock.folder.iterdir()] == [LOCK]:
            (lock.folder / LOCK).unlink()
            lock.folder.rmdir()


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
