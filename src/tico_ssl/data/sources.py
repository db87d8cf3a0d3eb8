"""Open the images of a recipe, in any format."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config import catalogue
from tico_ssl.config.sections import FOUND, DataConfig
from tico_ssl.data import formats
from tico_ssl.data.decoding import Reading
from tico_ssl.data.depth import Scaling
from tico_ssl.data.dicom import is_dicom
from tico_ssl.data.held_out import held_out
from tico_ssl.data.measuring import depth_of, found_scaling, in_bytes
from tico_ssl.data.names import SUFFIXES
from tico_ssl.data.source import Source, Split, joined
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import generator

Tell = Callable[[str], None]  # receives a line for the user
_told: set[tuple[str, str]] = set()  # lines about data, which are opened several times
MOST_CLASSES = 100_000  # unless there are as many images


def open_source(
    config: DataConfig,
    split: Split = "train",
    channels: int = 3,
    shorter: int | None = None,
    tell: Tell = say,
) -> Source | None:
    """The images of a recipe; large JPEGs may be decoded smaller as long as their shorter side keeps `shorter` pixels.
    None if there is no test split. `tell` receives a line about a range of values that was found in the images."""
    if config.held_out and split != "val":
        whole = open_training(config.model_copy(update={"held_out": 0.0}), channels, shorter, tell)
        left, out = held_out(whole, config.held_out, generator(0, "split"))  # the same for every seed
        return left if split == "train" else out
    reduced, windowed = shorter if config.reduced_decoding else None, config.range == FOUND
    reading = Reading(channels, reduced, windowed, config.tiles, config.tile_contrast)
    source = _joined(config, split, reading)
    if source is None:
        return None
    if split == "train":
        return _in_bytes(source, config, reading, tell).limited(config.limit)
    if windowed and (depth_of(source) is not None or _has_dicom(source)):  # they are mapped as training images are
        trained = open_training(config, channels, tell=tell)
        if trained.scaling is not None:
            return open_source(config.model_copy(update={"range": trained.scaling.limits}), split, channels, shorter)
    return _in_bytes(source, config, reading, tell)


def _joined(config: DataConfig, split: Split, reading: Reading) -> Source | None:
    """All images of a split with their values as they are."""
    parts = [_open(place, config, split, reading) for place in places_of(config)]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    source = joined(found)
    if len(source) == 0:
        raise UserError(f"{shown(config)}: no images found ({', '.join(sorted(SUFFIXES))})")
    for images in (part.images for part in found):
        if images is not None and images.shape[1] != reading.channels:
            raise UserError(
                f"{shown(config)}: images have {images.shape[1]} channels, backbone.channels is {reading.channels}"
            )
    if len(found) < len(parts) and split != "train":
        source = _numbered_as_in_training(source, config, reading)
    return source


def _numbered_as_in_training(source: Source, config: DataConfig, reading: Reading) -> Source:
    """The same with the class numbers of training, where there are classes that these images do not know of."""
    trained = _joined(config, "train", reading)
    if source.labels is None or trained is None or not set(source.classes) <= set(trained.classes):
        return source
    number = torch.tensor([trained.classes.index(name) for name in source.classes])
    return replace(source, labels=number[source.labels], classes=trained.classes)


def _has_dicom(source: Source) -> bool:
    return any(is_dicom(source.names(i).partition("#")[0]) for i in range(len(source)))


def _in_bytes(source: Source, config: DataConfig, reading: Reading, tell: Tell) -> Source:
    """The source with values of more than eight bits mapped to bytes: by the given range, else by one that is found in
    it."""
    kind = depth_of(source)
    if not isinstance(config.range, str):
        if np.ndim(config.range) == 2 and len(config.range) != reading.channels:
            raise UserError(f"data.range has {len(config.range)} pairs for backbone.channels {reading.channels}")
        return in_bytes(source, None if kind is None else Scaling(config.range, kind), config.range)
    if kind is None:
        return in_bytes(source, None, None)
    if _has_dicom(source):  # some have a window, others not: all do without
        source = _joined(config, "train", reading._replace(windowed=False)) or source
    scaling = found_scaling(source, reading.channels, kind)
    if (said := (shown(config), scaling.line())) not in _told:
        _told.add(said)
        tell(scaling.line())
    return in_bytes(source, scaling, scaling.limits)


def open_training(config: DataConfig, channels: int = 3, shorter: int | None = None, tell: Tell = say) -> Source:
    """The training images of a recipe; only a test split can be missing."""
    return required(open_source(config, "train", channels, shorter, tell), config)


def required(source: Source | None, config: DataConfig) -> Source:
    """The training images of a recipe, which have to be there."""
    if source is None:
        raise UserError(f"{shown(config)}: no training images")
    return source


def shown(config: DataConfig) -> str:
    """The data of a recipe as one line."""
    return " + ".join(places_of(config))


def places_of(config: DataConfig) -> list[str]:
    """The data of a recipe, one entry per path or name."""
    return [config.source] if isinstance(config.source, str) else list(config.source)


def _open(source: str, config: DataConfig, split: Split, reading: Reading) -> Source | None:
    name, place = formats.recognise(source)
    if split == "val" and split not in formats.splits(source):
        return None
    found: Source | None = catalogue.load(formats.KIND, name).open(place, split, reading, config)
    if found is not None and found.labels is not None:
        _require_classes(found.labels, source)
    return found


def _require_classes(labels: Tensor, source: str) -> None:
    """Class numbers index rows of classifiers and counts of votes: they are small and not negative. With several labels
    per image, they say absent (-1), difficult (0) or present (1), or only absent (0) or present (1)."""
    most = max(MOST_CLASSES, len(labels)) - 1
    low, high, kind = (0, most, "class numbers") if labels.ndim == 1 else (-1, 1, "labels by class")
    wrong = ((labels < low) | (labels > high)).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise UserError(f"{source}: {kind} are from {low} to {high:,}, but image {place[0]} has {int(labels[place])}")
