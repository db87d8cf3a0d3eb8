"""Training and test pictures in COCO's or VOC's layout."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tico_ssl.evaluations._detection.coco import find_coco, open_coco
from tico_ssl.evaluations._detection.pictures import Pictures
from tico_ssl.evaluations._detection.voc import find_voc, open_voc
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator

HELD_OUT = 0.2  # fraction of the images, where there is no test split


class Splits(NamedTuple):
    """Training pictures, test pictures, and how they were split."""

    train: Pictures
    test: Pictures
    how: str


def open_pictures(root: str | Path, seed: int) -> Splits:
    """Both splits of a folder in COCO's or VOC's layout. Without a test split, images are held out."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"{root}: no such folder; detection needs one in COCO's or VOC's layout")
    if (home := find_voc(folder)) is not None:
        found = open_voc(home)
    elif (files := find_coco(folder)) is not None:
        found = open_coco(*files)
    else:
        raise UserError(
            f"{root}: neither COCO's layout (annotations/instances_train2017.json, train2017/) nor VOC's "
            "(Annotations, ImageSets/Main, JPEGImages; also inside VOC2007)"
        )
    train, test = found
    how = "the data's own"
    if test is None:
        train, test = _held_out(train, seed)
        how = f"{HELD_OUT:.0%} held out by seed {seed}"
    train = replace(train, pictures=[picture for picture in train.pictures if picture.trainable()])
    for split in (train, test):
        if not any(picture.trainable() for picture in split.pictures):
            raise UserError(f"{split.name}: no image has an object")
    return Splits(train, test, how)


def _held_out(train: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    order = torch.randperm(len(train), generator=generator(seed, "split")).tolist()
    held = max(1, round(HELD_OUT * len(train)))
    if held == len(train):
        raise UserError(f"{train.name}: too few images to hold some out for a test")
    out, kept = sorted(order[:held]), sorted(order[held:])
    test = replace(train, name=f"{train.name}, held out", pictures=[train.pictures[place] for place in out])
    return replace(train, pictures=[train.pictures[place] for place in kept]), test
