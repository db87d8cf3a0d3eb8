"""All splits of a recipe's data: opened one by one, and together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data import formats
from tico_ssl.data.given import ALL_SPLITS
from tico_ssl.data.source import Source, Split, joined
from tico_ssl.data.sources import places_of, required, shown
from tico_ssl.runtime.errors import UserError

UNLABELLED = -1

Opener = Callable[[Split], Source | None]


@dataclass(frozen=True)
class Part:
    """The images of a split. `folder` comes before their names in a path."""

    split: Split
    source: Source
    folder: str = ""


def open_splits(config: DataConfig, opener: Opener, split: str = ALL_SPLITS) -> tuple[Part, ...]:
    """The images of a recipe, of all splits or of one, each opened by `opener`."""
    folders = _folders(config)
    opened = {name: opener(name) for name in folders}
    found = {name: source for name, source in opened.items() if source is not None}
    if not found:
        required(None, config)
    if split not in (ALL_SPLITS, *found):
        raise UserError(f"{shown(config)}: has no split {split}, only {', '.join(found)}")
    if len(places_of(config)) == 1 and len(found) > 1:
        folders = {name: folder or name for name, folder in folders.items()}
    chosen = [name for name in found if split in (ALL_SPLITS, name)]
    return tuple(Part(name, found[name], folders[name]) for name in chosen)


def _folders(config: DataConfig) -> dict[Split, str]:
    """The splits that there may be, and what comes before the names of their images in a path: nothing where several
    sources are joined, whose names do that themselves."""
    each = [formats.splits(place) for place in places_of(config)]
    if len(each) == 1:
        return each[0]
    return {name: "" for name in get_args(Split) if any(name in one for one in each)}


def together(parts: Sequence[Part], with_folders: bool = True) -> Source:
    """The images of all splits as one source; with `with_folders`, their names begin with the folder of the split."""
    if len(parts) == 1:
        return parts[0].source
    source = joined([replace(part.source, name=part.folder if with_folders else "") for part in parts])
    first = parts[0]
    name = first.source.name.removesuffix(f"/{first.folder}")
    return replace(source, name=name, labels=labels_of(parts), classes=classes_of(parts))


def labels_of(parts: Sequence[Part]) -> Tensor | None:
    """The class of every image (N), -1 in a split without labels; several (N, classes); None without any."""
    known = [part.source.labels for part in parts]
    shapes = {labels.shape[1:] for labels in known if labels is not None}
    if len(shapes) != 1:
        return None
    blanks = [torch.full((len(part.source), *next(iter(shapes))), UNLABELLED) for part in parts]
    return torch.cat([blank if labels is None else labels for labels, blank in zip(known, blanks, strict=True)])


def classes_of(parts: Sequence[Part]) -> tuple[str, ...]:
    """Names of the classes, in the order of their labels."""
    return next((part.source.classes for part in parts if part.source.classes), ())
