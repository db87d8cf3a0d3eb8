"""A folder of image files at any depth, with or without class folders and splits."""

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.formats import shards
from tico_ssl.data.formats._files import files_source
from tico_ssl.data.formats._walking import find_files, holds_file, is_hidden, readable_folder
from tico_ssl.data.names import ARRAY_SUFFIX, SUFFIXES
from tico_ssl.data.source import Source, Split, meant
from tico_ssl.runtime.errors import UserError

RANK = 3  # matches any folder: more specific formats are tried first
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {  # of folders, in capitals or not, with a number or not: train2017, test1
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "val": ("val", "valid", "validation"),
}
ANY_IMAGE = SUFFIXES | {ARRAY_SUFFIX}
IMAGES = {"images", "image", "imgs", "img"}  # of a folder of images beside which others are about them:
ABOUT = {"annotations", "labels", "label", "masks", "mask"}


def matches(place: str) -> bool:
    """Any folder."""
    return Path(place).expanduser().is_dir()


def splits(place: str) -> dict[Split, str]:
    """The splits, each with the name of its folder; without any, all images are for training."""
    return splits_in(Path(place).expanduser()) or {"train": ""}


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
    _, masks = _images_and_masks(folder)
    files = [file for file in _image_files(folder, reading.channels) if file.partition(os.sep)[0] not in masks]
    # Classes are numbered by the training folders, so that one missing in the test split does not shift the others.
    training = folder if split == "train" else _split_folder(root, "train") or root
    inside = sorted(_subfolders(training) - (masks if training == folder else _images_and_masks(training)[1]))
    classes = tuple(name for name in inside if holds_file(training / name, ANY_IMAGE))
    if all(split_called(name) for name in classes):  # test/ and val/ alone
        classes = ()
    labels = _labels_by_folder(files, folder, classes)
    name = str(Path(root.name, folder.relative_to(root)))
    return files_source(name, folder, files, reading, labels, classes if labels is not None else ())


def _image_files(folder: Path, channels: int) -> list[str]:
    """Arrays are images if nothing else is, or if images need not be pictures: next to photographs they are often
    something else."""
    if channels not in (1, 3):
        return find_files(folder, SUFFIXES | {ARRAY_SUFFIX})
    return find_files(folder, SUFFIXES) or find_files(folder, {ARRAY_SUFFIX})


def splits_in(root: Path) -> dict[Split, str]:
    """The splits of a folder, each with the path of its folder, if one is for training and no others hold images; none
    of other folders. One for testing or validation without images is left out."""
    images, masks = _images_and_masks(root)
    if masks:
        return {split: f"{images}/{name}" for split, name in splits_in(root / images).items()}
    inside = _subfolders(root)
    named = {name: split for name in sorted(inside) if (split := split_called(name)) is not None}
    if "train" not in named.values():
        return {}
    found: dict[Split, str] = {}
    for name, split in sorted(named.items(), key=lambda item: list(SPLIT_NAMES).index(item[1])):
        if split != "train" and not holds_file(root / name, ANY_IMAGE):
            continue
        if split in found:
            raise UserError(f"{root}: {found[split]} and {name} are both called as {split} images are: rename one")
        found[split] = name
    others = sorted(name for name in inside - named.keys() if holds_file(root / name, ANY_IMAGE))
    if others and len(found) > 1:
        raise UserError(
            f"{root}: {others[0]} holds images and is no split, as {' and '.join(found.values())} beside it are: "
            "move it elsewhere, or give the folders to read one by one"
        )
    return {} if others else found  # a class may be called train


def split_called(name: str) -> Split | None:
    """The split that a folder of this name is."""
    plain = re.sub(r"[-_ ]?\d{1,4}$", "", name.lower())
    return next((split for split, names in SPLIT_NAMES.items() if plain in names), None)


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
    """The folder of a split, if there are splits; else all images are for training, of a folder in VOC's layout those
    that are annotated."""
    if (annotated := _annotated(root)) is not None:
        return annotated if split == "train" else None
    found = splits_in(root) or {"train": ""}
    wanted = meant(split, found)
    return None if wanted is None else root / found[wanted]


def _annotated(root: Path) -> Path | None:
    """The images of a folder in VOC's layout, whose other folders may hold masks, or of one with nothing but such a
    folder, as VOCdevkit/VOC2012."""
    inside = _subfolders(root)
    if {"Annotations", "JPEGImages"} <= inside:
        return root / "JPEGImages"
    with readable_folder(root) as entries:
        alone = len(inside) == 1 and not any(Path(entry.name).suffix.lower() in ANY_IMAGE for entry in entries)
    home = root / inside.pop() if alone else root
    return home / "JPEGImages" if alone and {"Annotations", "JPEGImages"} <= _subfolders(home) else None


def _images_and_masks(folder: Path) -> tuple[str, set[str]]:
    """The folder of the images and those about them, which may hold images themselves, where no other does; else
    none."""
    inside = _subfolders(folder)
    images, about = ({name for name in inside if name.lower() in names} for names in (IMAGES, ABOUT))
    if len(images) == 1 and about and not any(holds_file(folder / name, ANY_IMAGE) for name in inside - images - about):
        return images.pop(), about
    return "", set()
