"""The folder of what can be computed again: decoded images, kept between commands and shared by all runs of a user.

$TICO_CACHE, or tico-ssl in the user's folder for caches. It has a size limit; if something new needs the room, what has
not been used for longest goes first. What is removed while a command uses it costs that command time, nothing else.
"""

import errno
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically

VARIABLE = "TICO_CACHE"
DEFAULT_LIMIT = 50 * 10**9  # bytes
FREE_SHARE = 0.5  # of the disk's free space that something new may take
ABOUT, LIMIT = "about.json", "limit"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Entry:
    """A folder in the cache: what it holds, its size in bytes, and when it was used last, in seconds since 1970."""

    folder: Path
    what: str
    bytes: int
    used: float

    @property
    def days_unused(self) -> float:
        """How long ago that was."""
        return max(0.0, time.time() - self.used) / 86_400


def cache_folder() -> Path:
    """Where the cache is; the folder may not exist yet. An OSError if the user has no home folder, as in some
    containers."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    try:
        usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, f"there is no home folder to keep a cache in: set {VARIABLE}") from error
    return Path(usual) / "tico-ssl"


def entries() -> list[Entry]:
    """What the cache holds, last used first."""
    found = []
    for about in cache_folder().glob(f"*/{ABOUT}"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged, or removed meanwhile
            what, folder = str(json.loads(about.read_text(encoding="utf-8"))["what"]), about.parent
            taken = sum(_on_disk(file) for file in folder.iterdir())
            found.append(Entry(folder, what, taken, about.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def _on_disk(file: Path) -> int:
    status = file.stat()
    return getattr(status, "st_blocks", -(-status.st_size // 512)) * 512


def limit() -> int:
    """Bytes that the cache may hold."""
    try:
        return int((cache_folder() / LIMIT).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return DEFAULT_LIMIT


def set_limit(text: str) -> int:
    """Set the limit, given as 20G or 500M; what is more than that is removed, unless it is in use."""
    number, unit = text.upper().removesuffix("B").strip(), ""
    if number[-1:] in UNITS:
        number, unit = number[:-1], number[-1:]
    try:
        size = round(float(number) * UNITS[unit])
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise UserError(f"{text}: not a size, such as 20G or 500M")
    cache_folder().mkdir(parents=True, exist_ok=True)
    write_atomically(cache_folder() / LIMIT, f"{size}\n")
    make_room(0)
    return size


def opened(name: str, what: str) -> Path:
    """A folder of the cache, made if needed and readable by its user alone; it now counts as used."""
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / ABOUT).is_file():
        write_atomically(folder / ABOUT, json.dumps({"what": what, "made": time.time()}) + "\n")
    os.utime(folder / ABOUT)
    return folder


def make_room(size: int, mine: Path | None = None) -> int:
    """Remove what was not used for longest, as long as `size` bytes more are over the limit; how many bytes there is
    room for, which may be less. `mine` stays."""
    held = entries()
    left = limit() - sum(entry.bytes for entry in held)
    for entry in reversed(held):
        if left >= size:
            break
        if entry.folder != mine and remove(entry.folder):
            left += entry.bytes
    return _on_this_disk(left)


def room() -> int:
    """How many bytes there is room for if everything stays."""
    return _on_this_disk(limit() - sum(entry.bytes for entry in entries()))


def _on_this_disk(size: int) -> int:
    return max(0, min(size, round(FREE_SHARE * _free_space())))


def remove(folder: Path) -> bool:
    """Remove a folder of the cache, unless a command uses it."""
    with suppress(OSError), (folder / ABOUT).open("rb+") as file:
        if not locked(file, alone=True):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


class HeldFile(FileIO):
    """A file that is open as long as something holds it."""

    def __del__(self) -> None:
        self.close()


def held(folder: Path) -> HeldFile:
    """A file; as long as it is open, the folder is not removed to make room."""
    file = HeldFile(folder / ABOUT, "rb+")
    locked(file, alone=False)
    return file


def locked(file: IO[bytes] | FileIO, alone: bool) -> bool:
    """Lock a file until it is closed, alone or together with others who do not want to be alone; whether that was
    possible. Unlike lockf, this lasts when the same file is read and closed elsewhere in the process, and worker
    processes share it."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _free_space() -> int:
    folder = cache_folder()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
