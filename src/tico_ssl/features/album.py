"""Images of one split or of several, one after the other, each with its path, split, label and class."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.given import ALL_SPLITS
from tico_ssl.data.source import joint_digest
from tico_ssl.data.splits import Part, classes_of, labels_of, open_splits
from tico_ssl.data.stored import open_stored
from tico_ssl.features.thumbnails import smallest_side, thumbnails
from tico_ssl.runtime.printing import printable


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

    def fetch(self, place: int) -> Tensor:
        """An image; BadImage if it cannot be read."""
        part, inside = self._at(place)
        return part.source.fetch(inside)

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
        return labels_of(self.parts)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return classes_of(self.parts)

    def fingerprint(self) -> str | None:
        """A digest of these images in this order; None if they have no identity."""
        return joint_digest([part.source.fingerprint() for part in self.parts])

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
    return Album(open_splits(config, lambda name: open_stored(config, name, channels, None, fill=False), split))
