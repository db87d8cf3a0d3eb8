"""The image files in a folder and in those below it: each once, whatever links there are."""

import os
import stat
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import numpy as np

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

NOT_THE_USERS = {"lost+found", "__MACOSX", "@eaDir"}  # folders of file systems, archives and storage servers
Entries = Iterator["os.DirEntry[str]"]


def find_files(folder: Path, suffixes: set[str]) -> list[str]:
    """Paths relative to the folder, sorted, without hidden files and folders.

    Links are followed last, and one that leads to a folder or a file that was found before is left out: a link to a
    folder above would otherwise repeat every image, without end. What is not a regular file is listed like any other
    and refused when it is read.
    """
    walk = Walk(folder, suffixes)
    again = walk.files_again()
    repeated = [*walk.folders_again, *(walk.files[i] for i in sorted(again))]
    if repeated:
        say(f"{folder}: left out {counted(len(repeated), 'link')} to what is there already, such as {repeated[0]}")
    return sorted(file for i, file in enumerate(walk.files) if i not in again) if again else sorted(walk.files)


def holds_file(folder: Path, suffixes: set[str]) -> bool:
    """Whether there is a file with one of these suffixes in a folder or below it, as far as no link has to be followed
    within it."""
    waiting = deque([folder])
    while waiting:
        with readable_folder(waiting.popleft()) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_symlink() or entry.name[entry.name.rfind(".") :].lower() in suffixes:
                    return True
    return False


class Walk:
    """All folders below one are read, links after everything else."""

    def __init__(self, root: Path, suffixes: set[str]) -> None:
        self.root, self.suffixes = root, suffixes
        self.files: list[str] = []
        self.folders_again: list[str] = []
        self._keys = array("Q")  # device and inode of each file: a set of a million pairs would take 200 MB
        self._folders: set[tuple[int, int]] = set()
        self._waiting, self._links = deque([""]), deque[str]()
        while self._waiting or self._links:
            self._visit(self._waiting.popleft() if self._waiting else self._links.popleft())

    def _visit(self, path: str) -> None:
        """A folder, or what a link leads to."""
        try:
            status = (self.root / path).stat()
            key = status.st_dev, status.st_ino
            is_folder = stat.S_ISDIR(status.st_mode)
        except OSError:  # a broken link, or one to itself: as unreadable as a damaged image, and named like one
            key, is_folder = (0, 0), False
        if not is_folder:
            self._add(path, *key)
        elif key in self._folders:
            self.folders_again.append(path)
        else:
            self._folders.add(key)
            self._read(path, key[0])

    def _read(self, path: str, device: int) -> None:
        prefix = path and path + os.sep
        with readable_folder(self.root / path) as entries:
            for entry in sorted(entries, key=attrgetter("name")):
                if is_hidden(entry.name):
                    continue
                if entry.is_symlink():
                    self._links.append(prefix + entry.name)
                elif entry.is_dir():
                    self._waiting.append(prefix + entry.name)
                else:
                    self._add(prefix + entry.name, device, entry.inode())

    def _add(self, path: str, device: int, inode: int) -> None:
        if path[path.rfind(".") :].lower() in self.suffixes:
            self.files.append(path)
            self._keys.append(device)
            self._keys.append(inode & 0xFFFF_FFFF_FFFF_FFFF)

    def files_again(self) -> set[int]:
        """Indices of files that are an earlier one under another name."""
        keys = np.frombuffer(self._keys, np.uint64).reshape(-1, 2)
        _, which, counts = np.unique(keys[:, 1], return_inverse=True, return_counts=True)
        seen, again = set(), set()
        for i in np.flatnonzero(counts[which] > 1).tolist():
            key = tuple(keys[i].tolist())
            # Some network file systems have no inodes, or give one to several files; those have one name each.
            if key in seen and key[1] and _has_other_names(self.root / self.files[i]):
                again.add(i)
            seen.add(key)
        return again


def _has_other_names(path: Path) -> bool:
    return path.is_symlink() or path.stat().st_nlink > 1


@contextmanager
def readable_folder(folder: Path) -> Iterator[Entries]:
    """The entries of a folder. One that cannot be read is an error: it may be a whole class."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except PermissionError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}): make it readable, or move it away") from error


def is_hidden(name: str) -> bool:
    """Whether a file or folder is left out by its name: hidden, or made by a machine for itself."""
    return name.startswith(".") or name in NOT_THE_USERS
