"""A torch Dataset that a Python program hands over, known by a name while the program runs."""

from typing import Any

from torch.utils.data import Dataset

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_dataset
from tico_ssl.data.decoding import Reading
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError

PREFIX = "python:"  # how the names of objects begin

# They are kept as long as the program runs: a run knows its data by name alone, and after `pretrain(data=Mine())`
# an evaluation of the run has to find them, although nobody else holds the object any more.
_handed_over: dict[str, Dataset[Any]] = {}


def hand_over(dataset: "Dataset[Any]") -> str:
    """The name of a data set in recipes: its class, and a number from the second object of the class on."""
    for name, known in _handed_over.items():
        if known is dataset:
            return name
    kind = type(dataset).__name__
    earlier = sum(type(known).__name__ == kind for known in _handed_over.values())
    name = f"{PREFIX}{kind}-{earlier + 1}" if earlier else PREFIX + kind
    _handed_over[name] = dataset
    return name


def matches(place: str) -> bool:
    """The name of an object, of this program or of another."""
    return place.startswith(PREFIX)


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """All of it is for training. Arrays are known by their content; images that the object makes one at a time have no
    identity, since what it makes of them may change and nothing would show it."""
    if place not in _handed_over:
        raise UserError(f"data.source '{place}' was a data set in a Python program: say which images with --data")
    return from_dataset(place, _handed_over[place], reading) if split == "train" else None
