"""Data formats, one file each, found by file name.

A format has `matches(place) -> bool`, which decides without torch whether it reads a value of `data.source`, and
`open(place, split, reading, config) -> Source | None`, which returns the images of a split, None if there is no test
split. Its sources should identify their images (`Source.identity`) where that is possible.

A format that knows its splits has `splits(place) -> dict[Split, str]` too: those that there are, val among them, each
with the folder that its images are in, empty if they are in none. Of others, train and test are asked for.

It may declare RANK (formats are tried by rank, default 0, then by name; more general ones come later), NAMES (of data
sets that need no path) and ENDINGS (of files that it reads).

A prefix selects a format explicitly, also one from another package: `folder:photos/`, `my_lab.formats.raw:scans/`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tico_ssl.config import catalogue
from tico_ssl.data.remote.urls import is_url, require_library, require_plain
from tico_ssl.runtime.errors import UserError, suggestion

if TYPE_CHECKING:
    from tico_ssl.data.source import Split

KIND = "data/formats"


def recognise(source: str) -> tuple[str, str]:
    """The name of the format that reads a source, and the source without prefix. Needs no torch."""
    if not source.strip():
        raise UserError("which images? Say it with --data (data.source is empty)")
    for url in filter(is_url, (source, source.partition(":")[2])):  # with or without the prefix of a format
        require_plain(url)
        require_library()
    try:
        return _recognise(source)
    except OSError as error:  # a name that is too long, a folder that cannot be read
        raise UserError(f"data '{source[:200]}' cannot be read ({error.strerror or error})") from error


def _recognise(source: str) -> tuple[str, str]:
    given, colon, place = source.partition(":")
    if colon and _is_format(given) and not Path(source).expanduser().exists():
        if not catalogue.declaration(KIND, given, "matches")(place):
            raise UserError(f"data '{source}': the format '{given}' does not read '{place}'")
        return given, place
    here = Path(source).expanduser().exists()
    for name in sorted(catalogue.entries(KIND), key=lambda name: (_declared(name, "RANK", 0), name)):
        if here and source in _declared(name, "NAMES", ()):
            continue  # what is there wins over a data set of the same name
        if _declared(name, "matches")(source):
            return name, source
    raise UserError(_unread(source))


def splits(source: str) -> dict["Split", str]:
    """The splits that a source may have, each with the folder of its images in paths."""
    name, place = recognise(source)
    known: Callable[[str], dict[Split, str]] | None = getattr(catalogue.load(KIND, name), "splits", None)
    return {"train": "", "test": ""} if known is None else known(place)


def names() -> dict[str, str]:
    """Data sets that need no path, with their formats."""
    return {name: format for format in catalogue.entries(KIND) for name in _declared(format, "NAMES", ())}


def _is_format(name: str) -> bool:
    return name in catalogue.entries(KIND) or ("." in name and all(part.isidentifier() for part in name.split(".")))


def _declared(name: str, part: str, default: Any = ...) -> Any:
    return catalogue.declaration(KIND, name, part, default)


def _unread(source: str) -> str:
    if is_url(source):
        return f"{source}: no .tar, .parquet or .tico file, and no folder of .tar or .parquet files"
    if Path(source).expanduser().exists():
        *others, last = sorted(end for name in catalogue.entries(KIND) for end in _declared(name, "ENDINGS", ()))
        return f"{source}: a folder, or a {', '.join(others)} or {last} file is needed"
    return f"data '{source}' is neither a file, a folder nor a known name{suggestion(source, names())}"
