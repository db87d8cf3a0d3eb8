"""Data as given by a caller, before it is opened. Nothing here imports torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from tico_ssl.data import formats
from tico_ssl.data.remote.urls import is_url
from tico_ssl.runtime.errors import UserError, suggestion

if TYPE_CHECKING:
    from torch.utils.data import Dataset

ALL_SPLITS = "all"
SPLITS = ("train", "val", "test", ALL_SPLITS)
Given = Union[str, os.PathLike[str], Sequence[str], Sequence[tuple[Any, Any]], "Dataset[Any]"]


def as_source(data: Given) -> str | list[str]:
    """Data as a recipe spells it: one source or several. A data set object, or a list of images or of pairs of an
    image and a label, gets a name by which this process can find it again."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if isinstance(data, Sequence) and all(isinstance(place, str | os.PathLike) for place in data):
        places = [os.fspath(place) for place in data if not isinstance(place, tuple)]
        return places[0] if len(places) == 1 else places

    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(f"data={data!r}: a place, a data set, or a list of places or images is expected")

    from tico_ssl.data.formats.dataset import hand_over  # a caller with such an object has imported torch

    return hand_over(data)


def places_in(folder: Path, source: str | list[str]) -> str | list[str]:
    """A source that was given in another working directory, for this one: what is there, by its full path."""
    if not isinstance(source, str):
        return [place for one in source for place in [places_in(folder, one)] if isinstance(place, str)]
    if (folder / source).exists():
        return str(folder / source)
    kind, colon, place = source.partition(":")
    return f"{kind}:{folder / place}" if colon and not is_url(source) and (folder / place).exists() else source


def in_words(data: Given | None) -> str:
    """The given data as one line."""
    named = None if data is None else as_source(data)
    return "the run's data" if named is None else named if isinstance(named, str) else " + ".join(named)


def require_data(source: str | list[str]) -> None:
    """Refuse sources that no format reads, and urls of nothing. Images themselves are checked when they are opened."""
    for given in [source] if isinstance(source, str) else source or [""]:
        _, place = formats.recognise(given)
        if is_url(place):
            from tico_ssl.data.remote.objects import require_there

            require_there(place)


def require_split(split: str) -> None:
    """Require the name of a split, or all."""
    if split not in SPLITS:
        raise UserError(f"no split is called '{split}'{suggestion(split, SPLITS)}")
