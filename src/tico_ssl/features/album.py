"""Images of one split or of several, one after the other, each with its path, split, label and class."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data import formats
from tico_ssl.data.formats.folder import splits_in
from tico_ssl.data.source import Source, Split
from tico_ssl.data.sources import required, shown
from tico_ssl.data.store import open_stored
from tico_ssl.features.homes import ALL_SPLITS
from tico_ssl.features.thumbnails import smallest_side, thumbnails
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable

UNLABELLED = -1


@dataclass(frozen=True)
class Part:
    """The images of a split. `folder` comes before their names in a path."""

    split: str
    source: Source
    folder: str = ""


@dataclass(frozen=True)
class Album:
    """All images, numbered through the splits."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return self.ends[-1]

    @cached_property
    def ends(self) -> list[int]:
        """Where each split ends."""
        return list(accumulate(len(part.source) for part in self.parts))

    def path(self, place: int) -> str:
        """The path of an image relative to the data, with its split, safe to print."""
        part, inside = self._at(place)
        name = printable(part.source.names(inside))
        return f"{part.folder}/{name}" if part.folder else name

    def split(self, place: int) -> str:
        """The split of an image."""
        return self._at(place)[0].split

    def class_of(self, place: int) -> str:
        """The name of an image's class, empty if it has none."""
        part, inside = self._at(place)
        labels, classes = part.source.labels, part.source.classes
        if labels is None or labels.ndim > 1:
            return ""
        label = int(labels[inside])
        return printable(classes[label]) if label < len(classes) else ""

    @cached_property
    def labels(self) -> Tensor | None:
        """The class of every image (N), -1 in a split without labels; several (N, classes); None without any."""
        known = [part.source.labels for part in self.parts]
        shapes = {labels.shape[1:] for labels in known if labels is not None}
        if len(shapes) != 1:
            return None
        blanks = [torch.full((len(part.source), *next(iter(shapes))), UNLABELLED) for part in self.parts]
        return torch.cat([blank if labels is None else labels for labels, blank in zip(known, blanks, strict=True)])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return next((part.source.classes for part in self.parts if part.source.classes), ())

    def fingerprint(self) -> str | None:
        """A digest of these images in this order; None if they have no identity."""
        known = [part.source.fingerprint() for part in self.parts]
        return None if None in known else hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

    def thumbnails(self, places: Sequence[int], most: int) -> np.ndarray:
        """Central squares (n, side, side, 3) of images, of at most so many pixels a side."""
        side = smallest_side([part.source for part in self.parts], most)
        found = np.zeros((len(places), side, side, 3), dtype=np.uint8)
        at = np.array([bisect_right(self.ends, place) for place in places])
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(at == number)
            inside = torch.tensor([self._at(places[i])[1] for i in mine.tolist()], dtype=torch.int64)
            found[mine] = thumbnails(part.source, inside, side)
        return found

    def _at(self, place: int) -> tuple[Part, int]:
        number = bisect_right(self.ends, place)
        return self.parts[number], place - (self.ends[number - 1] if number else 0)


def open_album(config: DataConfig, channels: int, split: str = ALL_SPLITS) -> Album:
    """The images of a recipe, of all splits or of one. JPEGs are decoded at full size, so that features are those that
    `backbone.preprocess` leads to."""
    config = config.model_copy(update={"reduced_decoding": False})
    folders = _split_folders(config)
    names: Sequence[Split] = ["train", "test"] if folders is None else [*folders]
    opened = {name: open_stored(config, name, channels, None, fill=False) for name in names}
    found = {name: source for name, source in opened.items() if source is not None}
    if not found:
        required(None, config)
    if split not in (ALL_SPLITS, *found):
        raise UserError(f"{shown(config)}: has no split {split}, only {', '.join(found)}")
    before = {name: name if len(found) > 1 else "" for name in found} if folders is None else folders
    chosen = [name for name in found if split in (ALL_SPLITS, name)]
    return Album(tuple(Part(name, found[name], before[name]) for name in chosen))


def _split_folders(config: DataConfig) -> dict[Split, str] | None:
    """The splits of folders, and what comes before the names of their images in a path; None for data of another
    format, which say themselves whether they have a test split."""
    places = [config.source] if isinstance(config.source, str) else list(config.source)
    known = [formats.recognise(place) for place in places]
    if any(name != "folder" for name, _ in known):
        return None
    found = [splits_in(Path(place).expanduser()) for _, place in known]
    if len(found) == 1:
        return found[0] or {"train": ""}
    return {name: "" for name in get_args(Split) if name == "train" or any(name in one for one in found)}
