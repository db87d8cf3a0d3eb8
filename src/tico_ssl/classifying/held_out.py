"""Labelled images for a classifier: what they must have, and those that are held out to choose by."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tico_ssl.config.sections import FOUND, DataConfig
from tico_ssl.data.formats import splits
from tico_ssl.data.formats.folder import splits_in
from tico_ssl.data.source import Source
from tico_ssl.data.stored import open_stored
from tico_ssl.evaluations._classification.subsets import class_orders
from tico_ssl.evaluations._classification.training import classes_of
from tico_ssl.evaluations._context import Context
from tico_ssl.features.extraction import needed_side
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say


def class_names(context: Context) -> tuple[str, ...]:
    """The classes in the order of their numbers; a UserError if the images do not make a classifier."""
    source = context.data["source"]
    if context.train.labels is None:
        raise UserError(f"{source}: no labels; a classifier needs two class folders or more, or other labelled data")
    train, test = context.labels()
    known = set(train.unique().tolist())
    if len(known) < 2:
        raise UserError(f"{source}: all training images are of one class; a classifier needs two or more")
    given = context.train.classes
    names = given + tuple(str(number) for number in range(len(given), classes_of(context.train, context.test)))
    if alone := [number for number in test.unique().tolist() if number not in known]:
        raise UserError(f"{source}: class '{names[alone[0]]}' has no training image; it needs two images or more")
    if empty := [name for number, name in enumerate(names) if number not in known]:
        say(f"without any image, and never named: {', '.join(empty[:5])}{', ...' if len(empty) > 5 else ''}")
    return names


def own_validation(context: Context, classes: tuple[str, ...]) -> Source | None:
    """The images of a split val beside train and test, which are there to choose by; None if there is none. Of a folder
    val/, classes that are unknown in training are left out."""
    place = context.data["source"]
    root = Path(place).expanduser()
    names = splits_in(root) if root.is_dir() else splits(place) if root.is_file() else {}
    if not {"test", "val"} <= names.keys():
        return None
    like = next(iter(context.backbones.lazy.values())).like
    config = DataConfig(source=str(root / names["val"]) if root.is_dir() else place, range=like.limits or FOUND)
    found = open_stored(config, "train" if root.is_dir() else "val", like.config.channels, needed_side(like))
    if found is None or found.labels is None:
        return None
    number = {name: place for place, name in enumerate(classes)}
    ours = torch.tensor([number.get(name, -1) for name in found.classes])[found.labels]
    known = (ours >= 0).nonzero().ravel()
    return replace(found, labels=ours, classes=classes).subset(known) if len(known) else None


def divided(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of images to train on, and of a share of every class, held out; at least one image of each is kept."""
    orders = class_orders(labels, seed)
    out = torch.cat([members[: min(len(members) - 1, round(share * len(members)))] for members in orders])
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[out] = False
    return kept.nonzero().ravel(), out.sort().values
