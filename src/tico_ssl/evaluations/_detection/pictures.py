"""Images with annotated objects, in one form for all layouts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tico_ssl.data.decoding import MOST_PIXELS
from tico_ssl.data.source import file_identity
from tico_ssl.runtime.errors import UserError

Rule = Literal["coco", "voc", "voc2007"]


def require_size(height: int, width: int) -> None:
    """Refuse, by a ValueError, a size that no image has."""
    if height < 1 or width < 1 or height * width > MOST_PIXELS:
        raise ValueError(f"no image has {width} x {height} pixels")


class Instance(NamedTuple):
    """One object: its class (from 1; 0 is background), its box (left, top, right, bottom) in pixels, and its outline as
    in COCO: polygons, or a run-length encoding. A crowd is excluded from training and from scoring; a difficult object
    (VOC) is trained on but excluded from scoring."""

    label: int
    box: tuple[float, float, float, float]
    outline: Any = None
    area: float = 0.0
    crowd: bool = False
    difficult: bool = False


class Picture(NamedTuple):
    """An image file, its size, and its objects."""

    file: Path
    width: int
    height: int
    instances: tuple[Instance, ...]

    def trainable(self) -> list[Instance]:
        """The objects to train on, boxes clipped at the border; those without area are left out."""
        kept = []
        for instance in self.instances:
            left, top, right, bottom = instance.box
            box = (max(left, 0.0), max(top, 0.0), min(right, float(self.width)), min(bottom, float(self.height)))
            if not instance.crowd and box[2] > box[0] and box[3] > box[1]:
                kept.append(instance._replace(box=box))
        return kept


@dataclass(frozen=True)
class Pictures:
    """A split: its images, its classes, and the scoring rule."""

    name: str
    pictures: Sequence[Picture]
    classes: tuple[str, ...]
    rule: Rule

    def __len__(self) -> int:
        return len(self.pictures)

    def fingerprint(self) -> str:
        """A digest of these images, known by their files, and of all that is annotated, in this order."""
        digest = hashlib.sha256(json.dumps([self.classes, self.rule]).encode())
        for file, *annotated in self.pictures:
            digest.update(file_identity(file) + json.dumps(annotated).encode())
        return digest.hexdigest()[:16]

    def first(self, count: int) -> "Pictures":
        """The first `count` pictures."""
        return replace(self, pictures=self.pictures[:count])

    def spread(self, count: int) -> "Pictures":
        """`count` evenly spaced pictures: those at the beginning of a list may be of one kind."""
        every = max(1.0, len(self) / max(1, count))
        return replace(self, pictures=[self.pictures[int(number * every)] for number in range(min(count, len(self)))])

    @property
    def has_outlines(self) -> bool:
        """Whether any object has an outline."""
        return any(instance.outline for picture in self.pictures for instance in picture.instances)


class Listing:
    """Tells whether files exist by listing every folder once: a data set has many files in few folders."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}

    def __contains__(self, file: Path) -> bool:
        if file.parent not in self._names:
            there = file.parent.iterdir() if file.parent.is_dir() else ()
            self._names[file.parent] = {entry.name for entry in there}
        return file.name in self._names[file.parent]

    def require(self, file: Path, where: Path) -> Path:
        """The file, or a UserError that names the annotation file."""
        if file not in self:
            raise UserError(f"{file}: no such image, but {where} names it")
        return file
