"""The parquet files of a data set and its splits, in the folder layouts of the Hugging Face hub."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tico_ssl.data.names import SUFFIXES
from tico_ssl.data.remote.objects import RemoteObject, remote_folder
from tico_ssl.data.remote.urls import is_folder, is_url
from tico_ssl.runtime.errors import UserError

T = TypeVar("T")
SUFFIX = ".parquet"
GLANCE = 100  # entries to look at: listing a folder of a million images would be slow
# prefixes of names, in order of preference
SPLIT_NAMES = {"train": ("train",), "test": ("test", "val"), "val": ("val",)}


def holds_parquet(root: Path) -> bool:
    """Whether a folder is a parquet data set: files here, in the folder of a configuration, or of a split in that.

    Parquet files next to images in deeper folders do not count: they describe those images.
    """
    endings, folders = _seen(root)
    if SUFFIX in endings:
        return True
    for folder in folders:
        endings, inside = _seen(folder, GLANCE)
        deeper = [_seen(place, GLANCE)[0] for place in inside if _names_split(place.name)]
        if any(SUFFIX in found and not found & SUFFIXES for found in (endings, *deeper)):
            return True
    return False


def _seen(folder: Path, most: int | None = None) -> tuple[set[str], list[Path]]:
    """The suffixes of the files in a folder, and its subfolders."""
    endings, folders = set(), []
    for entry in _entries(folder, most):
        if entry.is_dir():
            folders.append(Path(entry.path))
        else:
            endings.add(entry.name[entry.name.rfind(".") :])
    return endings, folders


def splits_named(place: str) -> list[str]:
    """The splits that names of files tell; a file alone is for training."""
    if is_url(place):
        names = [name for name, _ in remote_files(place)] if is_folder(place) else []
    else:
        path = Path(place).expanduser()
        names = [name for name, _ in _named_files(path)] if path.is_dir() else []
    return ["train", *(split for split in ("test", "val") if any(name.startswith(split) for name in names))]


def split_files(path: Path, split: str) -> list[Path] | None:
    """The files of a split; None if there is no such split, but for training."""
    if not path.is_dir():
        return [path] if split == "train" else None
    return chosen(_named_files(path), split, str(path))


def remote_files(url: str) -> list[tuple[str, RemoteObject]]:
    """The files of a data set in a folder of a store, sorted, each with the name that tells its split."""
    folder = url if url.endswith("/") else f"{url}/"
    found = [(str(blob)[len(folder) :], blob) for blob in remote_folder(folder, deep=True)]
    found = [(name, blob) for name, blob in found if name.endswith(SUFFIX)]
    homes = ("", "data/")
    here = [(name.removeprefix(home), blob) for home in homes for name, blob in found if _is_in(name, home)]
    if here:
        return sorted(((_split_name(name), blob) for name, blob in here), key=lambda file: (file[0], str(file[1])))
    configurations = sorted({top for name, _ in found if _is_in(name, f"{(top := name.partition('/')[0])}/")})
    if len(configurations) > 1:
        others = ", ".join(configurations)
        raise UserError(f"{url}: several data sets ({others}): choose one, such as {folder}{configurations[0]}/")
    return remote_files(f"{folder}{configurations[0]}/") if configurations else []


def _is_in(name: str, home: str) -> bool:
    """Whether a file is in a folder itself, or in one of its folders that is named after a split."""
    split, slash, file = name.removeprefix(home).rpartition("/")
    return name.startswith(home) and bool(file) and (not slash or ("/" not in split and _names_split(split)))


def chosen(files: list[tuple[str, T]], split: str, path: str) -> list[T] | None:
    """Of files with the names that tell their splits, those of one; None if there is no test split."""
    for start in SPLIT_NAMES[split]:
        named = [file for name, file in files if name.startswith(start)]
        if named:
            return named
    if split != "train":
        return None
    unnamed = [file for name, file in files if not name.startswith(SPLIT_NAMES["test"])]
    if not unnamed:
        raise UserError(f"{path}: no training files, only {files[0][0]} and the like")
    return unnamed


def _named_files(root: Path) -> list[tuple[str, Path]]:
    """The files of a data set, sorted, each with the name that tells its split: its own, or that of a split's folder.

    They are in the folder itself, in data/, or in the folder of its only configuration, whatever its name.
    """
    files = [*_files_of(root), *_files_of(root / "data")]
    if files:
        return sorted(files)
    folders = {entry.name: _files_of(Path(entry.path)) for entry in _entries(root)}
    configurations = sorted(name for name, found in folders.items() if found)
    if not configurations:
        raise UserError(f"{root}: no .parquet files found in it or its subfolders")
    if len(configurations) > 1:
        raise UserError(
            f"{root}: several data sets ({', '.join(configurations)}): choose one, such as {root / configurations[0]}"
        )
    return sorted(folders[configurations[0]])


def _files_of(folder: Path) -> list[tuple[str, Path]]:
    splits = [place for place in _seen(folder)[1] if _names_split(place.name)]
    found = [Path(entry.path) for place in (folder, *splits) for entry in _entries(place)]
    return [(_split_name(str(file.relative_to(folder))), file) for file in found if file.name.endswith(SUFFIX)]


def _names_split(name: str) -> bool:
    return _split_name(name).startswith((*SPLIT_NAMES["train"], *SPLIT_NAMES["test"]))


def _split_name(name: str) -> str:
    """The hub writes `partial-train` if it has converted only some of the rows."""
    return name.lower().removeprefix("partial-")


def _entries(folder: Path, most: int | None = None) -> Iterator["os.DirEntry[str]"]:
    """The entries of a readable folder, without hidden files and folders."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry for entry in islice(entries, most) if not entry.name.startswith("."))
