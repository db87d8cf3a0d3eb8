"""ImageNet-1k or a subset, also as distributed by Kaggle, and Tiny-ImageNet: class folders named by wnids."""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import Reading
from tico_ssl.data.formats.folder import open_folder
from tico_ssl.data.listings import read_json, read_lines
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

WNID = re.compile(r"n\d{8}")
WNID_AND_WORDS = re.compile(r"(n\d{8})\s+(.+)")
IMAGE_AND_WNID = re.compile(r"([^,\s]+),(n\d{8})\b.*")  # followed by bounding boxes, which are not needed
TINY_LINE = re.compile(r"(\S+)\t(n\d{8})\b.*")  # followed by a bounding box
UNSORTED = ("", "images")  # folders of validation images that are not classes: ImageNet's flat ones, Tiny-ImageNet's
DEVELOPMENT_KIT = Path("ILSVRC2012_devkit_t12", "data")


def matches(place: str) -> bool:
    """A folder with class folders named by wnids in train/, or Kaggle's archive with one."""
    return _home(Path(place).expanduser()) is not None


def _home(root: Path) -> Path | None:
    """The folder that holds train/ with folders named by wnids: this one, or the one inside Kaggle's archive."""
    places = (root, root / "CLS-LOC", root / "Data/CLS-LOC", root / "ILSVRC/Data/CLS-LOC")
    return next((place for place in places if _wnid_folders(place / "train")), None)


def splits(place: str) -> dict[Split, str]:
    """The images to train on, and those to test on, which are called validation images but for some subsets."""
    home = _home(Path(place).expanduser())
    assert home is not None
    folder = _test_folder(home)
    if folder is None:
        return {"train": "train"}
    return {"train": "train", "test" if folder.name == "test" else "val": folder.name}


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Class folders, numbered in the order of their wnids; validation images may also be flat, with a list."""
    home = _home(Path(place).expanduser())
    assert home is not None
    folder = home / "train" if split == "train" else _test_folder(home)
    if folder is None:
        return None
    source = open_folder(folder, "train", reading)
    assert source is not None
    wnids = _wnid_folders(home / "train")
    labels = source.labels if split == "train" else _test_labels(source, home, folder, wnids)
    words = _words(home) if labels is not None else {}
    # Words alone are not unique: two classes are called crane, two maillot.
    classes = tuple(f"{wnid} {words[wnid].split(',')[0]}" if wnid in words else wnid for wnid in wnids)
    name = f"{home.name}/{folder.name}"
    return replace(source, name=name, labels=labels, classes=classes if labels is not None else ())


def _test_folder(home: Path) -> Path | None:
    """The validation images: the labels of ImageNet's own test/ are not public."""
    for name in ("val", "valid", "validation"):
        if (home / name).is_dir():
            return home / name
    return home / "test" if _wnid_folders(home / "test") else None


def _test_labels(source: Source, home: Path, folder: Path, wnids: list[str]) -> Tensor | None:
    files = [source.names(i) for i in range(len(source))]
    listed = _validation_list(home) if any(_parent(file) in UNSORTED for file in files) else {}
    if listed is None or len(wnids) < 2:
        return None
    number = {wnid: i for i, wnid in enumerate(wnids)}
    labels = []
    for file in files:
        wnid = listed.get(Path(file).stem) if _parent(file) in UNSORTED else file.partition(os.sep)[0]
        if wnid is None:
            raise UserError(f"{folder / printable(file)}: is not in the list of validation labels")
        if wnid not in number:
            raise UserError(f"{folder / printable(file)}: of class {printable(wnid)}, which has no training folder")
        labels.append(number[wnid])
    return torch.tensor(labels, dtype=torch.int64)


def _validation_list(home: Path) -> dict[str, str] | None:
    """The wnid of every validation image, from Tiny-ImageNet's list, from Kaggle's or from the development kit."""
    table = _nearby(home, "val/val_annotations.txt", above=0)
    if table is not None:
        rows = read_lines(table, TINY_LINE, "an image, a tab and a wnid")
        return {Path(image).stem: wnid for _, (image, wnid) in rows}
    table = _nearby(home, "LOC_val_solution.csv")
    if table is not None:
        rows = read_lines(table, IMAGE_AND_WNID, "an image, a comma and a wnid", header="ImageId,PredictionString")
        return {image: wnid for _, (image, wnid) in rows}
    table = _nearby(home, DEVELOPMENT_KIT / "ILSVRC2012_validation_ground_truth.txt")
    if table is None:
        return None
    wnids = {number: wnid for number, wnid, _ in _synsets(table.with_name("meta.mat"))}
    found = {}
    for line, (number,) in read_lines(table, re.compile(r"(\d{1,9})"), "the number of a class"):
        if int(number) not in wnids:
            raise UserError(f"{table}: line {line}: class {number} is not in meta.mat")
        found[f"ILSVRC2012_val_{line:08}"] = wnids[int(number)]
    return found


def _words(home: Path) -> dict[str, str]:
    """Readable class names, if a file lists them."""
    table = _nearby(home, "words.txt", above=0) or _nearby(home, "LOC_synset_mapping.txt")
    if table is not None:
        return {wnid: words for _, (wnid, words) in read_lines(table, WNID_AND_WORDS, "a wnid and words")}
    if (table := _nearby(home, "imagenet_class_index.json")) is not None:
        try:
            return {wnid: words.replace("_", " ") for wnid, words in read_json(table).values()}
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f'{table}: entries must look like "0": ["n01440764", "tench"]') from error
    if (table := _nearby(home, DEVELOPMENT_KIT / "meta.mat")) is not None:
        return {wnid: words for _, wnid, words in _synsets(table)}
    return {}


def _synsets(path: Path) -> list[tuple[int, str, str]]:
    """Number, wnid and words of the classes. The development kit's numbers are not in the order of the wnids."""
    from scipy.io import loadmat

    try:
        rows = np.atleast_1d(loadmat(path, squeeze_me=True)["synsets"])
        return [(int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"])) for row in rows]
    except Exception as error:  # scipy raises many kinds of errors for a damaged file
        raise UserError(f"{path}: not a readable list of synsets ({str(error).partition(chr(10))[0]})") from error


def _parent(file: str) -> str:
    return file.rpartition(os.sep)[0]


def _nearby(home: Path, name: str | Path, above: int = 3) -> Path | None:
    """A file next to the images or up to three folders above, where Kaggle's archive begins."""
    places = (home, *home.absolute().parents[:above])
    return next((place / name for place in places if (place / name).is_file()), None)


def _wnid_folders(folder: Path) -> list[str]:
    """The class folders in order, if all folders are named by wnids."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    return names if all(WNID.fullmatch(name) for name in names) else []
