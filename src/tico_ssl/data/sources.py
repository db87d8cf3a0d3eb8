"""Where the images of a recipe come from: every kind of data behind one function.

Folders, lists of files, numpy files, packed files, tar shards, parquet, torchvision's data sets by name, and the
built-in textures.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tico_ssl.data.arrays import from_arrays, from_dataset, from_numpy
from tico_ssl.data.decoding import SUFFIXES
from tico_ssl.data.folders import open_folder, open_list
from tico_ssl.data.packed import SUFFIX as PACKED_SUFFIX
from tico_ssl.data.packed import open_packed
from tico_ssl.data.parquet import open_parquet
from tico_ssl.data.shards import open_shards
from tico_ssl.data.source import Source, Split, joined
from tico_ssl.data.textures import CLASSES, draw_textures
from tico_ssl.data.torchvision_sets import SETS, open_torchvision
from tico_ssl.errors import UserError, suggestion
from tico_ssl.section import Section

Values = Annotated[tuple[float, ...], Field(strict=False)]

TEXTURE_COUNTS = {"train": 10_000, "test": 2_000}


class DataConfig(Section):
    """Which images, and what the network is shown of them."""

    source: str | list[str] = "textures"
    """A folder of images (with or without class folders, with or without train/ and test/), several of them, a text
    file of paths, a packed, .npz, .npy, .tar or .parquet file, or a name: textures, cifar10, cifar100, stl10, ..."""
    root: str = "data"
    """Where data sets that are given by name lie on disk."""
    download: bool = False
    """Fetch a data set that is given by name when it is not there."""
    image_size: Annotated[int, Field(ge=8)] = 32
    """Pixels of the square that the network sees."""
    most_bad: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of unreadable files above which a run stops before it begins."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Train on this many images, drawn evenly from the whole (textures: draw this many)."""
    mean: Values = (0.485, 0.456, 0.406)
    """Mean of each channel, taken off; ImageNet's by default."""
    std: Values = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, divided by."""


def open_source(config: DataConfig, split: Split = "train", channels: int = 3) -> Source | None:
    """The images of a recipe. None when there is no test split."""
    places = [config.source] if isinstance(config.source, str) else config.source
    parts = [_open(place, config, split, channels) for place in places]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    source = joined(found)
    if len(source) == 0:
        raise UserError(f"{shown(config)}: no images found ({', '.join(sorted(SUFFIXES))})")
    if source.images is not None and source.images.shape[1] != channels:
        raise UserError(
            f"{shown(config)}: images have {source.images.shape[1]} channels, backbone.channels is {channels}"
        )
    return source.limited(config.limit) if split == "train" else source


def open_training(config: DataConfig, channels: int = 3) -> Source:
    """The training images of a recipe: only a test split can be absent."""
    source = open_source(config, "train", channels)
    assert source is not None
    return source


def as_source(data: str | os.PathLike[str] | Sequence[str]) -> str | list[str]:
    """What a caller names, as a recipe writes it: one place, or several."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    places = [os.fspath(place) for place in data]
    return places[0] if len(places) == 1 else places


def shown(config: DataConfig) -> str:
    """The data of a recipe in a line of text."""
    return config.source if isinstance(config.source, str) else " + ".join(config.source)


def _open(name: str, config: DataConfig, split: Split, channels: int) -> Source | None:
    if not name.strip():
        raise UserError("data.source is empty")
    if name == "textures":
        count = config.limit if split == "train" and config.limit else TEXTURE_COUNTS[split]
        images, labels = draw_textures(count, config.image_size, seed=0 if split == "train" else 1)
        return from_arrays(name, images, labels, CLASSES)
    if name in SETS:
        return from_dataset(name, open_torchvision(name, split, config.root, config.download), channels)
    return _open_path(name, split, channels)


def _open_path(name: str, split: Split, channels: int) -> Source | None:
    path = Path(name).expanduser()
    if path.is_dir():
        if _holds(path, ".parquet") or _holds(path / "data", ".parquet"):
            return open_parquet(path, split, channels)
        if _holds(path, ".tar"):
            return open_shards(str(path), channels) if split == "train" else None
        return open_folder(path, split, channels)
    if path.suffix == ".parquet" and path.is_file():
        return open_parquet(path, split, channels)
    if path.suffix in (".npz", ".npy") and path.is_file():
        return from_numpy(path, split)
    training_only = {".txt": lambda: open_list(path, channels), PACKED_SUFFIX: lambda: open_packed(path)}
    if path.suffix in training_only and path.is_file():
        return training_only[path.suffix]() if split == "train" else None
    if path.name.endswith((".tar", ".tar.gz", ".tgz")) or (set("{*?[") & set(name) and not path.exists()):
        return open_shards(name, channels) if split == "train" else None
    if path.exists():
        raise UserError(f"{name}: a folder, or a .txt, .npz, .npy, .tar, .parquet or {PACKED_SUFFIX} file is needed")
    hint = suggestion(name, ["textures", *SETS])
    raise UserError(f"data.source '{name}' is neither a file, a folder nor a known name{hint}")


def _holds(folder: Path, suffix: str) -> bool:
    """Whether a folder has a file that ends so, without a look at what lies deeper."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(suffix) for entry in entries)
