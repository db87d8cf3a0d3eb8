"""Where the images of a recipe come from: every kind of data behind one function.

Folders, data sets in their official layouts, lists of files, numpy files, packed files, tar shards, parquet,
torchvision's data sets by name, and the built-in textures.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_arrays, from_dataset, from_numpy
from tico_ssl.data.decoding import SUFFIXES, Reading
from tico_ssl.data.folders import open_folder, open_list
from tico_ssl.data.layouts import find_layout
from tico_ssl.data.packed import SUFFIX as PACKED_SUFFIX
from tico_ssl.data.packed import open_packed
from tico_ssl.data.parquet import holds_parquet, open_parquet
from tico_ssl.data.shards import COMPRESSED, open_shards
from tico_ssl.data.source import Source, Split, joined
from tico_ssl.data.textures import CLASSES, draw_textures
from tico_ssl.data.torchvision_sets import SETS, open_torchvision
from tico_ssl.runtime.errors import UserError, suggestion

PYTHON = "python:"  # how the names of data sets begin that were handed over as objects
Given = str | os.PathLike[str] | Sequence[str] | Dataset[Any]

_handed_over: dict[str, Dataset[Any]] = {}

TEXTURE_COUNTS = {"train": 10_000, "test": 2_000}


def open_source(
    config: DataConfig, split: Split = "train", channels: int = 3, shorter: int | None = None
) -> Source | None:
    """The images of a recipe, of which large JPEGs may be reduced as long as their shorter side keeps `shorter` pixels.
    None when there is no test split."""
    reading = Reading(channels, shorter if config.reduced_decoding else None)
    places = [config.source] if isinstance(config.source, str) else config.source
    parts = [_open(place, config, split, reading) for place in places]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    source = joined(found)
    if len(source) == 0:
        raise UserError(f"{shown(config)}: no images found ({', '.join(sorted(SUFFIXES))})")
    for images in (part.images for part in found):
        if images is not None and images.shape[1] != channels:
            raise UserError(f"{shown(config)}: images have {images.shape[1]} channels, backbone.channels is {channels}")
    return source.limited(config.limit) if split == "train" else source


def open_training(config: DataConfig, channels: int = 3, shorter: int | None = None) -> Source:
    """The training images of a recipe: only a test split can be absent."""
    source = open_source(config, "train", channels, shorter)
    assert source is not None
    return source


def as_source(data: Given) -> str | list[str]:
    """What a caller names, as a recipe writes it: one place, or several. A data set from Python gets a name, by which
    this process finds it again."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if isinstance(data, Dataset):
        name = PYTHON + type(data).__name__
        _handed_over[name] = data
        return name
    places = [os.fspath(place) for place in data]
    return places[0] if len(places) == 1 else places


def shown(config: DataConfig) -> str:
    """The data of a recipe in a line of text."""
    return config.source if isinstance(config.source, str) else " + ".join(config.source)


def _open(name: str, config: DataConfig, split: Split, reading: Reading) -> Source | None:
    if not name.strip():
        raise UserError("data.source is empty")
    if name == "textures":
        count = config.limit if split == "train" and config.limit else TEXTURE_COUNTS[split]
        images, labels = draw_textures(count, config.image_size, seed=0 if split == "train" else 1)
        return from_arrays(name, images, labels, CLASSES)
    if name.startswith(PYTHON):
        if name not in _handed_over:
            raise UserError(f"data.source '{name}' was a data set in a Python program: say which images with --data")
        return from_dataset(name, _handed_over[name], reading) if split == "train" else None
    if name in SETS:
        return from_dataset(name, open_torchvision(name, split, config.root, config.download), reading)
    return _open_path(name, split, reading)


def _open_path(name: str, split: Split, reading: Reading) -> Source | None:
    path = Path(name).expanduser()
    if path.is_dir():
        layout = find_layout(path)  # first: the archives that it was unpacked from often lie beside it
        if layout is not None:
            return layout(split, reading)
        if holds_parquet(path):
            return open_parquet(path, split, reading)
        if _holds(path, ".tar"):
            return open_shards(str(path), reading) if split == "train" else None
        images = open_folder(path, split, reading)
        if images is not None and len(images) == 0 and _holds(path, COMPRESSED):
            return open_shards(str(path), reading)  # which says what to do about them
        return images
    if path.suffix == ".parquet" and path.is_file():
        return open_parquet(path, split, reading)
    if path.suffix in (".npz", ".npy") and path.is_file():
        return from_numpy(path, split)
    training_only = {".txt": lambda: open_list(path, reading), PACKED_SUFFIX: lambda: open_packed(path, reading)}
    if path.suffix in training_only and path.is_file():
        return training_only[path.suffix]() if split == "train" else None
    if path.name.endswith((".tar", *COMPRESSED)) or (set("{*?[") & set(name) and not path.exists()):
        return open_shards(name, reading) if split == "train" else None
    if path.exists():
        raise UserError(f"{name}: a folder, or a .txt, .npz, .npy, .tar, .parquet or {PACKED_SUFFIX} file is needed")
    hint = suggestion(name, ["textures", *SETS])
    raise UserError(f"data.source '{name}' is neither a file, a folder nor a known name{hint}")


def _holds(folder: Path, suffix: str | tuple[str, ...]) -> bool:
    """Whether a folder has a file that ends so, without a look at what lies deeper."""
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(suffix) for entry in entries)
