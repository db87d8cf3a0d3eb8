"""iNaturalist 2018 as distributed: COCO-style lists with one annotation per image."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import Reading
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.listings import read_json, require_folders
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

LISTS = {"train": "train2018.json", "test": "val2018.json"}


def matches(place: str) -> bool:
    """A folder with the training list."""
    return (Path(place).expanduser() / LISTS["train"]).is_file()


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Classes are numbered in the order of the categories' numbers."""
    home = Path(place).expanduser()
    listing = home / LISTS[split]
    if not listing.is_file():
        return None
    data = read_json(listing)
    names = _names(home, data if split == "train" else None)
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


def _names(home: Path, training: Any) -> dict[int, str]:
    """Names by category, from the training list; the names of species were published later in a separate file."""
    path = home / "categories.json"
    if path.is_file():
        data = {"categories": read_json(path)}
    else:
        path = home / LISTS["train"]
        data = training or read_json(path)
    return dict(_pairs(path, data, "categories", id=int, name=str))


def _pairs(path: Path, data: Any, table: str, **fields: type) -> Iterator[tuple[Any, Any]]:
    """Two fields of every entry of a list in a JSON file, checked."""
    rows = data.get(table) if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"{path}: needs a list called '{table}'")
    for number, row in enumerate(rows):
        first, second = (row.get(field) if isinstance(row, dict) else None for field in fields)
        if not all(isinstance(value, kind) for value, kind in zip((first, second), fields.values())):
            wanted = " and ".join(f"'{field}' ({kind.__name__})" for field, kind in fields.items())
            raise UserError(f"{path}: {table}[{number}] needs {wanted}")
        yield first, second
