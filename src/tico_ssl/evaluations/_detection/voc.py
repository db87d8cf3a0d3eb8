"""PASCAL VOC as distributed, VOCdevkit with VOC2007 and VOC2012, and other data in a folder of that layout.

VOC itself is trained on trainval of all years and tested on test of 2007; without the test list, trained on train and
tested on val. Other data may have any classes, and the lists that they have: trainval or train, test or val; without a
list for the test, images are held out, and without any list all annotated images count.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.listings import read_lines
from tico_ssl.data.names import SUFFIXES
from tico_ssl.evaluations._detection.pictures import Instance, Listing, Picture, Pictures, Rule, require_size
from tico_ssl.runtime.errors import UserError, suggestion

YEARS = ("VOC2007", "VOC2012")
Parts = list[tuple[str, str]]
"""Years and lists; data of another origin have an empty year."""


class Read(NamedTuple):
    """A picture whose objects are not numbered yet, its annotation file, and the names of the objects' classes."""

    picture: Picture
    file: Path
    names: list[str]


def find_voc(root: Path) -> Path | None:
    """The folder of the years (also given by its parent or by one year), or a folder of that layout itself."""
    places = (root, root / "VOCdevkit", *([root.parent] if root.name in YEARS else []))
    years = next((place for place in places if any((place / year / "Annotations").is_dir() for year in YEARS)), None)
    alike = (root / "Annotations").is_dir() and (root / "JPEGImages").is_dir()
    return years or (root if alike else None)


def open_voc(home: Path) -> tuple[Pictures, Pictures | None]:
    """Both splits; None if there is no list of a test split."""
    years = [year for year in YEARS if (home / year / "Annotations").is_dir()]
    if not years:
        return _open_alike(home)
    if _list(home, "VOC2007", "test").is_file():
        return _open(home, [(year, "trainval") for year in years], [("VOC2007", "test")], "voc2007")
    return _open(home, [(years[-1], "train")], [(years[-1], "val")], "voc")


def _open_alike(home: Path) -> tuple[Pictures, Pictures | None]:
    """Data of another origin: the lists that they have."""
    there = [name for name in ("test", "val", "trainval", "train") if _list(home, "", name).is_file()]
    test = next((name for name in there if name in ("test", "val")), None)
    wanted = ("trainval", "train") if test != "val" else ("train",)  # trainval contains val
    train = next((name for name in wanted if name in there), None)
    if train is None:
        test = None
    return _open(home, [("", train or "")], None if test is None else [("", test)], "voc")


def _open(home: Path, train: Parts, test: Parts | None, rule: Rule) -> tuple[Pictures, Pictures | None]:
    splits = [(parts, _read(home, parts)) for parts in (train, *([] if test is None else [test]))]
    classes = _classes([one for _, read in splits for one in read], strict=bool(train[0][0]))
    found = [Pictures(_called(home, parts), _numbered(read, classes), classes, rule) for parts, read in splits]
    return found[0], found[1] if len(found) > 1 else None


def _called(home: Path, parts: Parts) -> str:
    return " + ".join(f"{year or home.name} {split}".strip() for year, split in parts)


def _classes(read: list[Read], strict: bool) -> tuple[str, ...]:
    """VOC's, or all names in order. VOC's own annotations may have no other names next to VOC's."""
    names = {name for one in read for name in one.names}
    others = names - set(VOC_CLASSES)
    if not others:
        return VOC_CLASSES
    if strict and others != names:
        file, name = next((one.file, name) for one in read for name in one.names if name in others)
        raise UserError(f"{file}: VOC has no class '{name}'{suggestion(name, VOC_CLASSES)}")
    return tuple(sorted(names))


def _numbered(read: list[Read], classes: tuple[str, ...]) -> list[Picture]:
    number = {name: place for place, name in enumerate(classes, 1)}
    return [
        one.picture._replace(
            instances=tuple(
                instance._replace(label=number[name])
                for instance, name in zip(one.picture.instances, one.names, strict=True)
            )
        )
        for one in read
    ]


def _read(home: Path, parts: Parts) -> list[Read]:
    read, listing = [], Listing()
    for year, split in parts:
        names = _list(home, year, split)
        for name in _listed(names) if split else _annotated(home):
            image = _image(home / year / "JPEGImages", name, listing, names)
            read.append(_picture(image, home / year / "Annotations" / f"{name}.xml"))
    return read


def _listed(names: Path) -> list[str]:
    if not names.is_file():
        raise UserError(f"{names}: no such file; VOC lists the images of a split there")
    lines = read_lines(names, re.compile(r"(\S+)(\s+-?\d+)?"), "the name of an image")
    return [name for _, (name, *_) in lines]


def _annotated(home: Path) -> list[str]:
    """All images with annotations, where there is no list."""
    return sorted(file.stem for file in (home / "Annotations").glob("*.xml"))


def _image(folder: Path, name: str, listing: Listing, names: Path) -> Path:
    """VOC has JPEGs; other data may have any kind of image."""
    usual = folder / f"{name}.jpg"
    places = (usual, *(folder / f"{name}{suffix}" for suffix in sorted(SUFFIXES)))
    return next((place for place in places if place in listing), None) or listing.require(usual, names)


def _list(home: Path, year: str, split: str) -> Path:
    return home / year / "ImageSets" / "Main" / f"{split}.txt"


def _picture(image: Path, file: Path) -> Read:
    try:
        root = ElementTree.parse(file).getroot()
        width, height = (int(_text(root, f"size/{side}")) for side in ("width", "height"))
        require_size(height, width)
        nodes = list(root.iter("object"))
        instances = tuple(_instance(node) for node in nodes)
        return Read(Picture(image, width, height, instances), file, [_text(node, "name") for node in nodes])
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file, but {image.name} is listed") from error
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last of an unknown encoding
        raise UserError(f"{file}: not an annotation of VOC ({error})") from error


def _instance(node: ElementTree.Element) -> Instance:
    """An object whose class is not numbered yet."""
    # Pixels are numbered from 1, and the last one belongs to the box.
    left, top, right, bottom = (float(_text(node, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    box = (left - 1, top - 1, right, bottom)
    if not all(map(math.isfinite, box)):
        raise ValueError(f"bndbox is {left}, {top}, {right}, {bottom}")
    difficult = (node.findtext("difficult") or "0").strip() == "1"
    area = (box[2] - box[0]) * (box[3] - box[1])
    return Instance(0, box, area=area, difficult=difficult)


def _text(node: ElementTree.Element, path: str) -> str:
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"{path} is missing")
    return text.strip()
