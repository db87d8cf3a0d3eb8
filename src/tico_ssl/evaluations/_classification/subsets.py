"""Labelled subsets: a fraction or a number of images per class, or the images of a list."""

from pathlib import Path, PurePath

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted


def class_orders(labels: Tensor, seed: int) -> list[Tensor]:
    """Indices of each class in a random order, from which all draws are taken."""
    order = torch.randperm(len(labels), generator=generator(seed, "probe", 1))
    return [order[labels[order] == label] for label in labels.unique()]


def share_of_each(labels: Tensor, share: float, seed: int) -> Tensor:
    """Indices of a fraction of every class, at least one image. A smaller fraction is contained in a larger one."""
    chosen = [members[: max(1, round(share * len(members)))] for members in class_orders(labels, seed)]
    return torch.cat(chosen).sort().values


def number_of_each(labels: Tensor, number: int, draw: int, seed: int) -> Tensor:
    """Indices of `number` images per class. Draws 0, 1, 2 ... are disjoint until a class runs out, and then start over
    with it."""
    chosen = []
    for members in class_orders(labels, seed):
        places = torch.arange(draw * number, (draw + 1) * number) % len(members)
        chosen.append(members[places])
    return torch.cat(chosen).sort().values


def listed(source: Source, path: str | Path) -> Tensor:
    """Indices of the images named in a text file, one per line, with folders or, where that says which, without."""
    path = Path(path).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    wanted = dict.fromkeys(line for line in lines if line)
    if not wanted:
        raise UserError(f"{path}: names no images")
    whole: dict[str, list[int]] = {}
    without_folders: dict[str, list[int]] = {}
    for place in range(len(source)):
        name = source.names(place)
        for places, form in ((whole, name), (without_folders, PurePath(name).name)):
            if form in wanted:
                places.setdefault(form, []).append(place)
    known = without_folders | whole
    missing = [name for name in wanted if name not in known]
    if missing:
        images = counted(len(source), "training image")
        raise UserError(
            f"{path}: {len(missing):,} of {len(wanted):,} names are not among the {images} of "
            f"{source.name}, for example {printable(missing[0])}"
        )
    if several := next((name for name in wanted if len(known[name]) > 1), None):
        one, other = (printable(source.names(place)) for place in known[several][:2])
        raise UserError(
            f"{path}: {printable(several)} may be {one} or {other} of {source.name}: list it with its folder"
        )
    return torch.tensor(sorted({known[name][0] for name in wanted}))
