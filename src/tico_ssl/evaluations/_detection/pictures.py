"""Images with the objects in them, in one form whatever the folder's layout, and the two splits of a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator

Rule = Literal["coco", "voc", "voc2007"]
HELD_OUT = 0.2  # of the images, where there is no split to test on


class Instance(NamedTuple):
    """One object: its class (from 1; 0 is background), its box (left, top, right, bottom) in pixels, and its outline as
    COCO writes it: polygons, or a run-length code. A crowd is neither trained on nor a miss; a difficult object (VOC)
    is trained on and no miss."""

    label: int
    box: tuple[float, float, float, float]
    outline: Any = None
    area: float = 0.0
    crowd: bool = False
    difficult: bool = False


class Picture(NamedTuple):
    """An image file, its size, and what is in it."""

    file: Path
    width: int
    height: int
    instances: tuple[Instance, ...]

    def trainable(self) -> list[Instance]:
        """The objects to train on, boxes cut off at the border; what has no area is left out."""
        kept = []
        for instance in self.instances:
            left, top, right, bottom = instance.box
            box = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
            if not instance.crowd and box[2] > box[0] and box[3] > box[1]:
                kept.append(instance._replace(box=box))
        return kept


@dataclass(frozen=True)
class Pictures:
    """A split: its images, its classes, and the rule by which detections in it are scored."""

    name: str
    pictures: Sequence[Picture]
    classes: tuple[str, ...]
    rule: Rule

    def __len__(self) -> int:
        return len(self.pictures)

    def first(self, count: int) -> "Pictures":
        """So many of them."""
        return replace(self, pictures=self.pictures[:count])

    def spread(self, count: int) -> "Pictures":
        """So many of them, at equal distances: those at the beginning of a list may be of one kind."""
        every = max(1.0, len(self) / max(1, count))
        return replace(self, pictures=[self.pictures[int(number * every)] for number in range(min(count, len(self)))])

    @property
    def has_outlines(self) -> bool:
        """Whether any object has one."""
        return any(instance.outline for picture in self.pictures for instance in picture.instances)


class Splits(NamedTuple):
    """What is trained on, what is tested on, and how they were chosen."""

    train: Pictures
    test: Pictures
    how: str


def open_pictures(root: str | Path, seed: int) -> Splits:
    """Both splits of a folder in COCO's or VOC's layout. Where there is none to test on, images are held out."""
    from tico_ssl.evaluations._detection.coco import find_coco, open_coco
    from tico_ssl.evaluations._detection.voc import find_voc, open_voc

    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"{root}: no such folder; detection needs one in COCO's or VOC's layout")
    if (home := find_voc(folder)) is not None:
        found: tuple[Pictures, Pictures | None] = open_voc(home)
    elif (files := find_coco(folder)) is not None:
        found = open_coco(*files)
    else:
        raise UserError(
            f"{root}: neither COCO's layout (annotations/instances_train2017.json, train2017/) nor VOC's "
            "(VOC2007/Annotations, VOC2007/ImageSets/Main)"
        )
    train, test = found
    how = "the data's own"
    if test is None:
        train, test = _held_out(train, seed)
        how = f"{HELD_OUT:.0%} held out by seed {seed}"
    train = replace(train, pictures=[picture for picture in train.pictures if picture.trainable()])
    for split in (train, test):
        if not any(picture.trainable() for picture in split.pictures):
            raise UserError(f"{split.name}: there is no object in any image")
    return Splits(train, test, how)


def _held_out(train: Pictures, seed: int) -> tuple[Pictures, Pictures]:
    order = torch.randperm(len(train), generator=generator(seed, "split")).tolist()
    held = max(1, round(HELD_OUT * len(train)))
    if held == len(train):
        raise UserError(f"{train.name}: too few images to hold some out for a test")
    out, kept = sorted(order[:held]), sorted(order[held:])
    test = replace(train, name=f"{train.name}, held out", pictures=[train.pictures[place] for place in out])
    return replace(train, pictures=[train.pictures[place] for place in kept]), test


class Listing:
    """Tells whether files exist by looking through every folder once: a data set has many files in few folders."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}

    def __contains__(self, file: Path) -> bool:
        if file.parent not in self._names:
            there = file.parent.iterdir() if file.parent.is_dir() else ()
            self._names[file.parent] = {entry.name for entry in there}
        return file.name in self._names[file.parent]

    def require(self, file: Path, where: Path) -> Path:
        """The file, or a line that says who names it."""
        if file not in self:
            raise UserError(f"{file}: no such image, but {where} names it")
        return file
