"""Data in COCO's format: annotations/instances_train2017.json with train2017/, or train/_annotations.coco.json, or one
file for all images, annotations.json. Its categories may be any."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tico_ssl.data.listings import read_json
from tico_ssl.evaluations._detection.outlines import require_outline
from tico_ssl.evaluations._detection.pictures import Instance, Listing, Picture, Pictures, require_size
from tico_ssl.results.record import is_number
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

SINGLE = ("_annotations.coco.json", "annotations.json", "instances.json", "coco.json")  # of all images together
TEST_NAMES = ("val", "valid", "validation", "test")


def find_coco(root: Path) -> tuple[Path, Path | None] | None:
    """The annotation files of the training split and of the test split, if there is one."""
    folder = root / "annotations" if (root / "annotations").is_dir() else root
    named = {
        match[1]: file
        for file in sorted([*folder.glob("instances_*.json"), *root.glob("*/_annotations.coco.json")])
        if (match := re.fullmatch(r"(?:instances_)?(.+)", file.stem if file.parent == folder else file.parent.name))
    }
    training = sorted(name for name in named if re.fullmatch(r"train\d*", name))
    if not training:
        single = (place / name for name in SINGLE for place in (root, folder))
        return next(((file, None) for file in single if file.is_file()), None)
    train = training[-1]  # the latest year
    year = train.removeprefix("train")
    test = next((named[name + year] for name in TEST_NAMES if name + year in named), None)
    return named[train], test


def open_coco(train: Path, test: Path | None) -> tuple[Pictures, Pictures | None]:
    """Both splits. Categories are those of the training split, ordered by their ids, which may have gaps; a test split
    may number them otherwise."""
    first = read_json(train)
    names = {row["id"]: row["name"] for row in _rows(train, first, "categories", id=int, name=str)}
    if not names:
        raise UserError(f"{train}: has no categories")
    numbers = sorted(names)
    labels = {number: label for label, number in enumerate(numbers, 1)}
    classes = tuple(names[number] for number in numbers)

    def pictures(file: Path, content: Any, labels: dict[int, int]) -> Pictures:
        return Pictures(f"{file.parent.name}/{file.name}", _read(file, content, labels), classes, "coco")

    if test is None:
        return pictures(train, first, labels), None
    second = read_json(test)
    return pictures(train, first, labels), pictures(test, second, _labels_by_name(test, second, names, labels))


def _labels_by_name(file: Path, content: Any, names: dict[int, str], labels: dict[int, int]) -> dict[int, int]:
    """The labels of a test file's categories, which are known by their names: each file may have ids of its own. A file
    without categories has those of training."""
    if not isinstance(content, dict) or "categories" not in content:
        return labels
    ids: dict[str, list[int]] = defaultdict(list)
    for number, name in names.items():
        ids[name].append(number)
    used = {row["category_id"] for row in _rows(file, content, "annotations", category_id=int)}
    found = {}
    for row in _rows(file, content, "categories", id=int, name=str):
        number, name = row["id"], row["name"]
        same = number if names.get(number) == name else ids[name][0] if len(ids[name]) == 1 else None
        if same is not None:
            found[number] = labels[same]
        elif number in used:
            what = "several categories" if ids[name] else "no category"
            raise UserError(f"{file}: the training images have {what} called '{printable(name)}'")
    return found


def _read(file: Path, content: Any, labels: dict[int, int]) -> list[Picture]:
    images = list(_rows(file, content, "images", id=int, file_name=str, width=int, height=int))
    known = {row["id"]: row for row in images}
    for row in images:
        try:
            require_size(row["height"], row["width"])
        except ValueError as error:
            raise UserError(f"{file}: image {row['id']}: {error}") from error
    if len(known) != len(images):
        raise UserError(f"{file}: two images have the same id")
    instances: dict[int, list[Instance]] = defaultdict(list)
    for row in _rows(file, content, "annotations", image_id=int, category_id=int, bbox=list):
        if row["image_id"] not in known:
            raise UserError(f"{file}: annotation {row.get('id')} refers to unknown image {row['image_id']}")
        if row["category_id"] not in labels:
            raise UserError(f"{file}: annotation {row.get('id')} refers to unknown category {row['category_id']}")
        instance, image = _instance(file, row, labels[row["category_id"]]), known[row["image_id"]]
        try:
            require_outline(instance.outline, image["height"], image["width"])
        except ValueError as error:
            raise UserError(f"{file}: annotation {row.get('id')}: segmentation {error}") from error
        instances[row["image_id"]].append(instance)
    folder, listing = _image_folder(file, images), Listing()
    return [
        Picture(
            listing.require(folder / row["file_name"], file), row["width"], row["height"], tuple(instances[row["id"]])
        )
        for row in images
    ]


def _instance(file: Path, row: dict[str, Any], label: int) -> Instance:
    box = row["bbox"]
    if len(box) != 4 or not all(map(is_number, box)):
        raise UserError(f"{file}: annotation {row.get('id')}: bbox needs left, top, width and height, has {box}")
    left, top, width, height = map(float, box)
    area, crowd = row.get("area"), row.get("iscrowd")
    if crowd not in (0, 1, None):  # the text "0" would count as true
        raise UserError(f"{file}: annotation {row.get('id')}: iscrowd is 0 or 1, not {crowd!r}")
    outline = row.get("segmentation") or None
    if isinstance(outline, list):  # a polygon needs three corners to have an area
        outline = [ring for ring in outline if isinstance(ring, list) and len(ring) >= 6 and len(ring) % 2 == 0] or None
    elif outline is not None and not (isinstance(outline, dict) and {"counts", "size"} <= outline.keys()):
        raise UserError(f"{file}: annotation {row.get('id')}: segmentation needs polygons or a run-length encoding")
    size = float(area) if area is not None and is_number(area) else width * height
    return Instance(label, (left, top, left + width, top + height), outline, size, bool(crowd))


def _image_folder(file: Path, images: list[dict[str, Any]]) -> Path:
    """The image folder of an annotation file: beside it, named like the split, or called images."""
    split, root = file.stem.removeprefix("instances_"), file.parent.parent
    places = [file.parent, root / split, root / "images" / split, root / "images", root]
    if not images:
        raise UserError(f"{file}: lists no images")
    first = images[0]["file_name"]
    return next((place for place in places if (place / first).is_file()), root / split)


def _rows(file: Path, content: Any, table: str, **fields: type) -> list[dict[str, Any]]:
    """The entries of a list in a JSON file, each with the required fields."""
    rows = content.get(table) if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"{file}: needs a list called '{table}'")
    for place, row in enumerate(rows):
        for name, kind in fields.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise UserError(f"{file}: {table}[{place}] needs '{name}' ({kind.__name__})")
    return rows
