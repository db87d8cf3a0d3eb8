"""Places-205 as distributed: lists of files with class numbers.

The existence of the two and a half million listed files is not checked, so that opening takes seconds: a missing file
is handled like any unreadable one. Class folders are few and are checked.
"""

import re
from pathlib import Path

import torch

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import Reading
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.listings import read_lines, require_folders
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

LISTS = {
    "train": "trainvalsplit_places205/train_places205.csv",
    "test": "trainvalsplit_places205/val_places205.csv",
}
IMAGES = ("data/vision/torralba/deeplearning/images256", "images256", ".")
CATEGORIES = ("placesCategory_places205.csv", "categoryIndex_places205.csv")
LINE = re.compile(r"/?(.*[^\s,])[\s,]+(\d{1,9})")


def matches(place: str) -> bool:
    """A folder with the training list."""
    return (Path(place).expanduser() / LISTS["train"]).is_file()


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """The folders of the files name the classes."""
    home = Path(place).expanduser()
    listing = home / LISTS[split]
    if not listing.is_file():
        return None
    files, labels = _read_list(listing)
    classes = _classes(home, (files, labels) if split == "train" else None)
    wrong = next((i for i, label in enumerate(labels) if label >= len(classes)), None)
    if wrong is not None:
        raise UserError(f"{listing}: {printable(files[wrong])} is of class {labels[wrong]}, there are {len(classes)}")
    images = next(home / folder for folder in IMAGES if (home / folder).is_dir())
    require_folders(images, files, listing)
    return files_source(f"{home.name}/{listing.stem}", images, files, reading, torch.tensor(labels), classes)


def _read_list(path: Path) -> tuple[list[str], list[int]]:
    files, labels = [], []
    for _, (file, label) in read_lines(path, LINE, "a path and the number of a class"):
        files.append(file)
        labels.append(int(label))
    return files, labels


def _classes(home: Path, training: tuple[list[str], list[int]] | None) -> tuple[str, ...]:
    """Class names from the table of categories, else from the training list, so that both splits agree."""
    folders = (home, (home / LISTS["train"]).parent)
    tables = (folder / name for folder in folders for name in CATEGORIES)
    path = next((table for table in tables if table.is_file()), None)
    names: dict[int, str] = {}
    if path is not None:
        rows = read_lines(path, LINE, "a category and its number", header="category")
        names = {int(number): category for _, (category, number) in rows}
    else:
        path = home / LISTS["train"]
        for file, label in zip(*(training or _read_list(path))):
            names.setdefault(label, file.rpartition("/")[0])
    missing = next((i for i in range(len(names)) if i not in names), None)
    if missing is not None:
        raise UserError(f"{path}: classes are numbered from 0 to {max(names)}, but there is no {missing}")
    return tuple(printable(names[i]) for i in range(len(names)))
