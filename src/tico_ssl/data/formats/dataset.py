"""A torch Dataset or a list of images from a Python program, known by a name while the program runs."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_dataset
from tico_ssl.data.decoding import Reading
from tico_ssl.data.item_labels import labels_of, of_items
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

PREFIX = "python:"  # of the names of objects

# Kept as long as the program runs: a run stores only the name of its data, and an evaluation after
# `pretrain(data=Mine())` has to find the object, although nobody else holds a reference to it.
_handed_over: dict[str, Dataset[Any] | Sequence[Any]] = {}
_of_items: dict[tuple[str, int], list[Any] | None] = {}  # labels by name and number of images


def hand_over(dataset: "Dataset[Any] | Sequence[Any]") -> str:
    """The name of a data set in recipes: its class, with a number from the second object of a class on."""
    for name, known in _handed_over.items():
        if known is dataset:
            return name
    kind = type(dataset).__name__
    earlier = sum(type(known).__name__ == kind for known in _handed_over.values())
    name = f"{PREFIX}{kind}-{earlier + 1}" if earlier else PREFIX + kind
    _handed_over[name] = dataset
    return name


def matches(place: str) -> bool:
    """The name of an object, of this or of another program."""
    return place.startswith(PREFIX)


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Training split only. Arrays are identified by content; images that the object computes one at a time have no
    identity, since its code may change without a trace."""
    if place not in _handed_over:
        raise UserError(f"data '{place}' was a data set in a Python program: say which images with --data")
    if split != "train":
        return None
    dataset: Any = _handed_over[place]

    def read(items: Any) -> list[Any] | None:
        """Once, as that may mean to decode all images. Those of a list are at hand, and it may be sorted anew."""
        if isinstance(items, list | tuple):
            return of_items(items)
        known = place, len(items)
        if known not in _of_items:
            _of_items[known] = of_items(items)
        return _of_items[known]

    return from_dataset(place, dataset, reading, labels_of(dataset, read))
