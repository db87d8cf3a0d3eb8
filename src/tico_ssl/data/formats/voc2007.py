"""VOC2007 as distributed: multi-label, twenty classes."""

import re
from pathlib import Path

import torch

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import Reading
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.listings import read_lines, require_folders
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

LISTS = {"train": "trainval", "test": "test"}
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def matches(place: str) -> bool:
    """A folder with the training lists of the classes, or its parent."""
    return _home(Path(place).expanduser()) is not None


def _home(root: Path) -> Path | None:
    places = (root, root / "VOC2007", root / "VOCdevkit/VOC2007")
    return next((place for place in places if any(file.is_file() for file in _lists(place, LISTS["train"]))), None)


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Labels are (N, 20), as in the lists: 1 present, -1 absent, 0 difficult."""
    home = _home(Path(place).expanduser())
    assert home is not None
    lists = _lists(home, LISTS[split])
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
    return files_source(f"{home.name}/{LISTS[split]}", home / "JPEGImages", files, reading, labels, VOC_CLASSES)


def _lists(home: Path, images: str) -> list[Path]:
    return [home / "ImageSets/Main" / f"{name}_{images}.txt" for name in VOC_CLASSES]
