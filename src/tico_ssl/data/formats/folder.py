"""A folder of image files at any depth, with or without class folders and splits."""

import os
from pathlib import Path

import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.formats import shards
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.formats._walking import find_files, holds_file, is_hidden, readable_folder
from tico_ssl.data.names import ARRAY_SUFFIX, SUFFIXES
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

RANK = 3  # matches any folder: more specific formats are tried first
VALIDATION = ("val", "valid", "validation")
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", *VALIDATION), "val": VALIDATION}


def matches(place: str) -> bool:
    """Any folder."""
    return Path(place).expanduser().is_dir()


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Image files. For a folder of compressed shards instead, the error says what to do."""
    root = Path(place).expanduser()
    source = open_folder(root, split, reading)
    if source is not None and len(source) == 0 and shards.holds(root, shards.COMPRESSED):
        return shards.open_shards(place, reading)
    return source


def open_folder(root: Path, split: Split, reading: Reading = IN_FULL) -> Source | None:
    """Image files at any depth. There are labels if every file is in one of two or more class folders."""
    folder = _split_folder(root, split)
    if folder is None:
        return None
    files = _image_files(folder, reading.channels)
    # Classes are numbered by the training folders, so that one missing in the test split does not shift the others.
    training = _split_folder(root, "train") or root
    suffixes = SUFFIXES | {ARRAY_SUFFIX}
    classes = tuple(name for name in sorted(_subfolders(training)) if holds_file(training / name, suffixes))
    labels = _labels_by_folder(files, folder, classes)
    name = folder.name if folder == root else f"{root.name}/{folder.name}"
    return files_source(name, folder, files, reading, labels, classes if labels is not None else ())


def _image_files(folder: Path, channels: int) -> list[str]:
    """Arrays are images if nothing else is, or if images need not be pictures: next to photographs they are often
    something else."""
    if channels not in (1, 3):
        return find_files(folder, SUFFIXES | {ARRAY_SUFFIX})
    return find_files(folder, SUFFIXES) or find_files(folder, {ARRAY_SUFFIX})


def splits_in(root: Path) -> dict[Split, str]:
    """The splits of a folder that contains nothing else, each with the name of its folder; none of other folders."""
    inside = _subfolders(root)
    if not _only_splits(inside):
        return {}
    own: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test",), "val": VALIDATION}
    return {split: name for split, names in own.items() for name in [n for n in names if n in inside][:1]}


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
    """Names of the folders in a folder, without links to one that is above or beside them."""
    with readable_folder(folder) as entries:
        inside = {entry.name: entry for entry in entries if not is_hidden(entry.name) and entry.is_dir()}
    links = {name for name, entry in inside.items() if entry.is_symlink()}
    known = {place.stat().st_ino for place in (folder, *folder.absolute().parents)} if links else set()
    known |= {entry.inode() for name, entry in inside.items() if name not in links} if links else set()
    return {name for name, entry in inside.items() if name not in links or entry.stat().st_ino not in known}


def _split_folder(root: Path, split: Split) -> Path | None:
    """root/train and root/test (or val, ...), if root contains only splits; else all images are for training, of a
    folder in VOC's layout those that are annotated."""
    inside = _subfolders(root)
    if {"Annotations", "JPEGImages"} <= inside:  # VOC's layout, whose other folders may hold masks
        return root / "JPEGImages" if split == "train" else None
    if not _only_splits(inside):
        return root if split == "train" else None
    return next((root / name for name in SPLIT_FOLDERS[split] if name in inside), None)


def _only_splits(inside: set[str]) -> bool:
    names = {name for kind in SPLIT_FOLDERS.values() for name in kind}
    return "train" in inside and inside <= names  # a class may be called train
