"""Data sets as their authors hand them out: ImageNet-1k, Tiny-ImageNet, Places-205, iNaturalist 2018 and VOC2007.

A folder is recognised by what it holds. Lists are believed about files, so that a million of them open in seconds: one
that is missing is found like any other that cannot be read. Class folders are few, so those are looked for.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tico_ssl.data.decoding import Reading
from tico_ssl.data.folders import files_source
from tico_ssl.data.imagenet import find_imagenet, open_imagenet
from tico_ssl.data.listings import read_json, read_lines, require_folders
from tico_ssl.data.names import printable
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

Opener = Callable[[Split, Reading], Source | None]

PLACES_LISTS: dict[Split, str] = {
    "train": "trainvalsplit_places205/train_places205.csv",
    "test": "trainvalsplit_places205/val_places205.csv",
}
PLACES_IMAGES = ("data/vision/torralba/deeplearning/images256", "images256", ".")
PLACES_CATEGORIES = ("placesCategory_places205.csv", "categoryIndex_places205.csv")
PLACES_LINE = re.compile(r"/?(.*[^\s,])[\s,]+(\d{1,9})")

INATURALIST_LISTS: dict[Split, str] = {"train": "train2018.json", "test": "val2018.json"}

VOC_LISTS: dict[Split, str] = {"train": "trainval", "test": "test"}
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def find_layout(root: Path) -> Opener | None:
    """What opens a split of this folder, if the folder is one of the data sets."""
    for find, open_split in LAYOUTS:
        home = find(root)
        if home is not None:
            return partial(open_split, home)
    return None


def _find_places(root: Path) -> Path | None:
    return root if (root / PLACES_LISTS["train"]).is_file() else None


def _open_places(home: Path, split: Split, reading: Reading) -> Source | None:
    """Lists of files with class numbers; the folders of the files name the classes."""
    listing = home / PLACES_LISTS[split]
    if not listing.is_file():
        return None
    files, labels = _places_list(listing)
    classes = _places_classes(home, (files, labels) if split == "train" else None)
    wrong = next((i for i, label in enumerate(labels) if label >= len(classes)), None)
    if wrong is not None:
        raise UserError(f"{listing}: {printable(files[wrong])} is of class {labels[wrong]}, there are {len(classes)}")
    images = next(home / place for place in PLACES_IMAGES if (home / place).is_dir())
    require_folders(images, files, listing)
    return files_source(f"{home.name}/{listing.stem}", images, files, reading, torch.tensor(labels), classes)


def _places_list(path: Path) -> tuple[list[str], list[int]]:
    files, labels = [], []
    for _, (file, label) in read_lines(path, PLACES_LINE, "a path and the number of a class"):
        files.append(file)
        labels.append(int(label))
    return files, labels


def _places_classes(home: Path, training: tuple[list[str], list[int]] | None) -> tuple[str, ...]:
    """From the table of categories, else from the training list, so that both splits name the classes alike."""
    folders = (home, (home / PLACES_LISTS["train"]).parent)
    tables = (folder / name for folder in folders for name in PLACES_CATEGORIES)
    path = next((table for table in tables if table.is_file()), None)
    names: dict[int, str] = {}
    if path is not None:
        rows = read_lines(path, PLACES_LINE, "a category and its number", header="category")
        names = {int(number): category for _, (category, number) in rows}
    else:
        path = home / PLACES_LISTS["train"]
        for file, label in zip(*(training or _places_list(path))):
            names.setdefault(label, file.rpartition("/")[0])
    missing = next((i for i in range(len(names)) if i not in names), None)
    if missing is not None:
        raise UserError(f"{path}: classes are numbered from 0 to {max(names)}, but there is no {missing}")
    return tuple(printable(names[i]) for i in range(len(names)))


def _find_inaturalist(root: Path) -> Path | None:
    return root if (root / INATURALIST_LISTS["train"]).is_file() else None


def _open_inaturalist(home: Path, split: Split, reading: Reading) -> Source | None:
    """Lists in COCO's manner, of one annotation an image."""
    listing = home / INATURALIST_LISTS[split]
    if not listing.is_file():
        return None
    data = read_json(listing)
    names = _inaturalist_names(home, data if split == "train" else None)
    number = {category: i for i, category in enumerate(sorted(names))}
    category_of = dict(_pairs(listing, data, "annotations", image_id=int, category_id=int))
    files, labels = [], []
    for image, file in _pairs(listing, data, "images", id=int, file_name=str):
        category = category_of.get(image)
        if category not in number:
            what = "has no annotation" if category is None else f"is of category {category}, which is not listed"
            raise UserError(f"{listing}: image {image} ({printable(file)}) {what}")
        files.append(file)
        labels.append(number[category])
    require_folders(home, files, listing)
    classes = tuple(names[category] for category in number)
    return files_source(f"{home.name}/{listing.stem}", home, files, reading, torch.tensor(labels), classes)


def _inaturalist_names(home: Path, training: Any) -> dict[int, str]:
    """Names by category, from the training list: the names of species came later, in a file of their own."""
    path = home / "categories.json"
    if path.is_file():
        data = {"categories": read_json(path)}
    else:
        path = home / INATURALIST_LISTS["train"]
        data = training or read_json(path)
    return dict(_pairs(path, data, "categories", id=int, name=str))


def _pairs(path: Path, data: Any, table: str, **fields: type) -> Iterator[tuple[Any, Any]]:
    """Two fields of every entry of a list in a JSON file."""
    rows = data.get(table) if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"{path}: needs a list called '{table}'")
    for place, row in enumerate(rows):
        first, second = (row.get(field) if isinstance(row, dict) else None for field in fields)
        if not all(isinstance(value, kind) for value, kind in zip((first, second), fields.values())):
            wanted = " and ".join(f"'{field}' ({kind.__name__})" for field, kind in fields.items())
            raise UserError(f"{path}: {table}[{place}] needs {wanted}")
        yield first, second


def _find_voc(root: Path) -> Path | None:
    places = (root, root / "VOC2007", root / "VOCdevkit/VOC2007")
    return next((place for place in places if any(file.is_file() for file in _voc_lists(place, "train"))), None)


def _open_voc(home: Path, split: Split, reading: Reading) -> Source | None:
    """Several classes an image. Labels are (N, 20), as the lists have them: 1 there, -1 not, 0 hard to say."""
    lists = _voc_lists(home, split)
    if not any(listing.is_file() for listing in lists):
        return None
    images: list[str] = []
    columns: list[list[int]] = []
    for listing in lists:
        if not listing.is_file():
            raise UserError(f"{listing}: no such file, while other classes have theirs")
        rows = [row for _, row in read_lines(listing, re.compile(r"(\S+)\s+(-1|0|1)"), "an image and -1, 0 or 1")]
        found = [image for image, _ in rows]
        if columns and found != images:
            raise UserError(f"{listing}: does not list the same images as {lists[0].name}")
        images = found
        columns.append([int(value) for _, value in rows])
    files = [f"{image}.jpg" for image in images]
    require_folders(home / "JPEGImages", files, lists[0])
    labels = torch.tensor(columns, dtype=torch.int64).T.contiguous()
    return files_source(f"{home.name}/{VOC_LISTS[split]}", home / "JPEGImages", files, reading, labels, VOC_CLASSES)


def _voc_lists(home: Path, split: Split) -> list[Path]:
    return [home / "ImageSets/Main" / f"{name}_{VOC_LISTS[split]}.txt" for name in VOC_CLASSES]


LAYOUTS = (
    (find_imagenet, open_imagenet),
    (_find_places, _open_places),
    (_find_inaturalist, _open_inaturalist),
    (_find_voc, _open_voc),
)
