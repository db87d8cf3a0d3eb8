"""The images to classify: folders with all that is in them, files, patterns, and whatever --data takes."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.data import formats
from tico_ssl.data.names import SUFFIXES
from tico_ssl.data.remote.urls import is_url
from tico_ssl.runtime.errors import UserError

if TYPE_CHECKING:
    from tico_ssl.config.sections import Limits
    from tico_ssl.data.decoding import Reading
    from tico_ssl.data.source import Source

Places = list[str | list[str]]
"""Folders and data sets by name, and lists of image files."""


def places_of(given: Sequence[str | Path]) -> Places:
    """What is given, in order, with patterns expanded. Needs no torch."""
    if not given:
        raise UserError("which images? Give folders, files or patterns")
    places: Places = []
    for place in (found for each in given for found in _expanded(str(each))):
        path = Path(place).expanduser()
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            if not places or isinstance(places[-1], str):
                places.append([])
            files = places[-1]
            assert isinstance(files, list)
            files.append(str(path))
        else:
            formats.recognise(place)
            places.append(place)
    return places


def _expanded(place: str) -> list[str]:
    """The files and folders of a pattern such as 'photos/*.jpg'; anything else as it is."""
    path = Path(place).expanduser()
    if is_url(place) or not glob.has_magic(place) or path.exists():
        return [place]
    found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - of any folder, also an absolute one
    if not found:
        raise UserError(f"{place}: no file matches this pattern")
    return found


def open_places(places: Places, channels: int, shorter: int, limits: "Limits | None" = None) -> "Source":
    """The images as one source; of a data set with a test split, that. `limits` of deep values become 0 to 255."""
    from tico_ssl.data.decoding import Reading
    from tico_ssl.data.measuring import in_bytes
    from tico_ssl.data.source import joined

    reading = Reading(channels, shorter, windowed=limits is None)
    source = in_bytes(joined([_open(place, reading, limits) for place in places]), None, limits)
    if len(source) == 0:
        shown = [place if isinstance(place, str) else place[0] for place in places]
        raise UserError(f"{' + '.join(shown)}: no images found ({', '.join(sorted(SUFFIXES))})")
    return source


def _open(place: str | list[str], reading: "Reading", limits: "Limits | None") -> "Source":
    from tico_ssl.config.sections import FOUND, DataConfig
    from tico_ssl.data.formats._files import files_source
    from tico_ssl.data.formats._walking import find_files
    from tico_ssl.data.sources import open_source, open_training

    if isinstance(place, list):
        return files_source("files", Path(), place, reading)
    kind, where = formats.recognise(place)
    if kind == "folder":  # all of it, whatever its folders are called
        root = Path(where).expanduser()
        return files_source(root.name, root, find_files(root, SUFFIXES), reading)
    config = DataConfig(source=place, range=limits or FOUND)
    found = open_source(config, "test", reading.channels, reading.shorter)
    return open_training(config, reading.channels, reading.shorter) if found is None else found
