"""What a caller names as data, before any of it is opened. Nothing here imports torch."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from tico_ssl.data import formats

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Given = Union[str, os.PathLike[str], Sequence[str], "Dataset[Any]"]


def as_source(data: Given) -> str | list[str]:
    """What a caller names, as a recipe writes it: one place, or several. A data set from Python gets a name, by which
    this process finds it again."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if isinstance(data, Sequence):
        places = [os.fspath(place) for place in data]
        return places[0] if len(places) == 1 else places

    from tico_ssl.data.formats.dataset import hand_over  # who has such an object has imported torch

    return hand_over(data)


def in_words(data: Given | None) -> str:
    """What was given as data, in a line."""
    named = None if data is None else as_source(data)
    return "the run's data" if named is None else named if isinstance(named, str) else " + ".join(named)


def require_data(source: str | list[str]) -> None:
    """Refuse what no format reads; whether the images themselves can be read is found when they are opened."""
    for place in [source] if isinstance(source, str) else source or [""]:
        formats.recognise(place)
