"""PASCAL VOC as distributed: VOCdevkit with VOC2007 and VOC2012.

Trained on trainval of all years, tested on test of 2007. Without the test list: trained on train, tested on val.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.listings import read_lines
from tico_ssl.evaluations._detection.pictures import Instance, Listing, Picture, Pictures, Rule
from tico_ssl.runtime.errors import UserError, suggestion

YEARS = ("VOC2007", "VOC2012")


def find_voc(root: Path) -> Path | None:
    """The folder of the years; accepts VOCdevkit, its parent folder, or one year."""
    places = (root, root / "VOCdevkit", *([root.parent] if root.name in YEARS else []))
    return next((place for place in places if any((place / year / "Annotations").is_dir() for year in YEARS)), None)


def open_voc(home: Path) -> tuple[Pictures, Pictures]:
    """Both splits."""
    years = [year for year in YEARS if (home / year / "Annotations").is_dir()]
    if _list(home, "VOC2007", "test").is_file():
        train = [(year, "trainval") for year in years]
        return _open(home, train, "voc2007"), _open(home, [("VOC2007", "test")], "voc2007")
    return _open(home, [(years[-1], "train")], "voc"), _open(home, [(years[-1], "val")], "voc")


def _open(home: Path, parts: list[tuple[str, str]], rule: Rule) -> Pictures:
    pictures, listing = [], Listing()
    for year, split in parts:
        names = _list(home, year, split)
        if not names.is_file():
            raise UserError(f"{names}: no such file; VOC lists the images of a split there")
        for _, (name, *_) in read_lines(names, re.compile(r"(\S+)(\s+-?\d+)?"), "the name of an image"):
            image = listing.require(home / year / "JPEGImages" / f"{name}.jpg", names)
            pictures.append(_picture(image, home / year / "Annotations" / f"{name}.xml"))
    return Pictures(" + ".join(f"{year} {split}" for year, split in parts), pictures, VOC_CLASSES, rule)


def _list(home: Path, year: str, split: str) -> Path:
    return home / year / "ImageSets" / "Main" / f"{split}.txt"


def _picture(image: Path, file: Path) -> Picture:
    try:
        root = ElementTree.parse(file).getroot()
        width, height = (int(_text(root, f"size/{side}")) for side in ("width", "height"))
        instances = tuple(_instance(node, file) for node in root.iter("object"))
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file, but {image.name} is listed") from error
    except UserError:
        raise
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{file}: not an annotation of VOC ({error})") from error
    return Picture(image, width, height, instances)


def _instance(node: ElementTree.Element, file: Path) -> Instance:
    name = _text(node, "name")
    if name not in VOC_CLASSES:
        raise UserError(f"{file}: VOC has no class '{name}'{suggestion(name, VOC_CLASSES)}")
    # Pixels are numbered from 1, and the last one belongs to the box.
    left, top, right, bottom = (float(_text(node, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    box = (left - 1, top - 1, right, bottom)
    difficult = (node.findtext("difficult") or "0").strip() == "1"
    area = (box[2] - box[0]) * (box[3] - box[1])
    return Instance(VOC_CLASSES.index(name) + 1, box, area=area, difficult=difficult)


def _text(node: ElementTree.Element, path: str) -> str:
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"{path} is missing")
    return text.strip()
