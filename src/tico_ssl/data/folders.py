"""Images in files: a folder of any depth, with or without class folders and splits, or a text file that lists paths."""

import os
from pathlib import Path

import torch
from torch import Tensor

from tico_ssl.data.decoding import ARRAY_SUFFIX, IN_FULL, SUFFIXES, Reading
from tico_ssl.data.names import Names, printable
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "valid", "validation")}


def open_folder(root: Path, split: Split, reading: Reading = IN_FULL) -> Source | None:
    """Image files at any depth. Labels exist when every file lies in one of two or more class folders."""
    folder = _split_folder(root, split)
    if folder is None:
        return None
    files = _image_files(folder, SUFFIXES if reading.channels in (1, 3) else {ARRAY_SUFFIX, ".tif", ".tiff"})
    files.sort()
    # The training folders number the classes, so that a class that is missing in the test does not shift the others.
    classes = tuple(sorted(_subfolders(_split_folder(root, "train") or root)))
    labels = _labels_by_folder(files, folder, classes)
    name = folder.name if folder == root else f"{root.name}/{folder.name}"
    return files_source(name, folder, files, reading, labels, classes if labels is not None else ())


def open_list(path: Path, reading: Reading = IN_FULL) -> Source:
    """The files that a text names, one a line, relative to the text; empty lines and comments (#) do not count."""
    lines = [os.fsdecode(line.strip()) for line in path.read_bytes().splitlines()]
    files = [line for line in lines if line and not line.startswith("#")]
    missing = next((file for file in files if not (path.parent / file).exists()), None)
    if missing is not None:
        raise UserError(f"{path}: names a file that does not exist: {printable(missing)}")
    return files_source(path.name, path.parent, files, reading)


def files_source(
    name: str,
    folder: Path,
    files: list[str],
    reading: Reading,
    labels: Tensor | None = None,
    classes: tuple[str, ...] = (),
) -> Source:
    """Files with paths relative to a folder, in the order given."""
    names = Names(files)
    return Source(
        name,
        len(names),
        lambda i: reading.decode(folder / names[i], printable(names[i])),
        labels=labels,
        classes=classes,
        names=names.__getitem__,
        files=lambda i: folder / names[i],
    )


def _image_files(folder: Path, suffixes: set[str]) -> list[str]:
    """Paths relative to the folder; hidden files and folders are left out."""
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        prefix = parent[len(str(folder)) :].lstrip(os.sep)
        for file in files:
            if file[0] != "." and file[file.rfind(".") :].lower() in suffixes:
                found.append(f"{prefix}{os.sep}{file}" if prefix else file)
    return found


def _labels_by_folder(files: list[str], folder: Path, classes: tuple[str, ...]) -> Tensor | None:
    if len(classes) < 2 or not all(os.sep in file for file in files):
        return None
    tops = [file[: file.index(os.sep)] for file in files]
    number = {name: i for i, name in enumerate(classes)}
    unknown = set(tops) - number.keys()
    if unknown:
        raise UserError(f"{folder / min(unknown)}: a class that has no training folder")
    return torch.tensor([number[top] for top in tops])


def _subfolders(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}


def _split_folder(root: Path, split: Split) -> Path | None:
    """root/train and root/test (or val, ...), if splits are all that root holds; else the whole is for training."""
    inside = _subfolders(root)
    names = {name for kind in SPLIT_FOLDERS.values() for name in kind}
    if "train" not in inside or not inside <= names:  # a class may be called train
        return root if split == "train" else None
    return next((root / name for name in SPLIT_FOLDERS[split] if name in inside), None)
