"""Sources of images: folders, numpy archives, torchvision's data sets by name, and the built-in textures.

A source knows how many images it has, their labels if they have any, and how to give one of them. Sources whose images
are all of one size also hold them as one tensor, which the loader can keep on the device.
"""

import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from tico_ssl.data.decoding import SUFFIXES, decode, pixels
from tico_ssl.data.textures import CLASSES, draw_textures
from tico_ssl.data.torchvision_sets import SETS, open_torchvision
from tico_ssl.errors import UserError, suggestion
from tico_ssl.section import Section

Split = Literal["train", "test"]
Values = Annotated[tuple[float, ...], Field(strict=False)]

TEXTURE_COUNTS = {"train": 10_000, "test": 2_000}
SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "valid", "validation")}


class DataConfig(Section):
    """Which images, and what the network is shown of them."""

    source: str = "textures"
    """A folder of images (with or without class folders, with or without train/ and test/), a .npz or .npy file,
    or a name: textures, cifar10, cifar100, stl10, ..."""
    root: str = "data"
    """Where data sets that are given by name lie on disk."""
    download: bool = False
    """Fetch a data set that is given by name when it is not there."""
    image_size: Annotated[int, Field(ge=8)] = 32
    """Pixels of the square that the network sees."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Train on this many images, drawn evenly from the whole (textures: draw this many)."""
    mean: Values = (0.485, 0.456, 0.406)
    """Mean of each channel, taken off; ImageNet's by default."""
    std: Values = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, divided by."""


@dataclass(frozen=True)
class Source:
    """Images, and labels if there are any. `images` is one uint8 tensor (N, C, H, W) where all have one size."""

    name: str
    count: int
    fetch: Callable[[int], Tensor]
    images: Tensor | None = None
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    names: Callable[[int], str] = field(default=str)

    def __len__(self) -> int:
        return self.count

    def subset(self, index: Tensor) -> "Source":
        """The images at these places."""
        places = index.tolist()
        return Source(
            self.name,
            len(places),
            lambda i: self.fetch(places[i]),
            None if self.images is None else self.images[index],
            None if self.labels is None else self.labels[index],
            self.classes,
            lambda i: self.names(places[i]),
        )

    def limited(self, limit: int | None) -> "Source":
        """At most `limit` images, evenly spaced, so that files sorted by class keep every class."""
        if limit is None or limit >= self.count:
            return self
        return self.subset(torch.arange(limit) * self.count // limit)


def open_source(config: DataConfig, split: Split = "train", channels: int = 3) -> Source | None:
    """The images of a recipe. None when there is no test split."""
    source = _open(config, split, channels)
    if source is None:
        return None
    if len(source) == 0:
        raise UserError(f"{config.source}: no images found ({', '.join(sorted(SUFFIXES))})")
    if source.images is not None and source.images.shape[1] != channels:
        raise UserError(
            f"{config.source}: images have {source.images.shape[1]} channels, backbone.channels is {channels}"
        )
    return source.limited(config.limit) if split == "train" else source


def _open(config: DataConfig, split: Split, channels: int) -> Source | None:
    name, path = config.source, Path(config.source).expanduser()
    if not name.strip():
        raise UserError("data.source is empty")
    if name == "textures":
        count = config.limit if split == "train" and config.limit else TEXTURE_COUNTS[split]
        images, labels = draw_textures(count, config.image_size, seed=0 if split == "train" else 1)
        return from_arrays(name, images, labels, CLASSES)
    if name in SETS:
        return from_dataset(name, open_torchvision(name, split, config.root, config.download), channels)
    if path.is_dir():
        return from_folder(path, split, channels)
    if path.suffix in (".npz", ".npy") and path.is_file():
        return from_numpy(path, split)
    if path.exists():
        raise UserError(f"{name}: a folder, a .npz or a .npy file is needed")
    hint = suggestion(name, ["textures", *SETS])
    raise UserError(f"data.source '{name}' is neither a file, a folder nor a known name{hint}")


def from_arrays(name: str, images: Tensor, labels: Tensor | None, classes: tuple[str, ...] = ()) -> Source:
    """A source of images that are in memory."""
    return Source(name, len(images), images.__getitem__, images, labels, classes)


def from_numpy(path: Path, split: Split) -> Source | None:
    """`.npy`: images. `.npz`: x_train/y_train/x_test/y_test, or images/labels. Channels first, last or absent."""
    if path.suffix == ".npy" and split == "test":
        return None
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray) != (path.suffix == ".npy"):
            raise UserError(f"{path}: the contents are those of the other kind of numpy file (.npy, .npz)")
        if isinstance(loaded, np.ndarray):
            return from_arrays(path.name, _channels_first(loaded, path), None)
        with loaded as archive:
            pairs = [(f"x_{split}", f"y_{split}")] + ([("images", "labels")] if split == "train" else [])
            found = next((pair for pair in pairs if pair[0] in archive), None)
            if found is None:
                if split == "test":
                    return None
                raise UserError(
                    f"{path}: needs arrays x_train (and y_train) or images (and labels), has {archive.files}"
                )
            images = _channels_first(archive[found[0]], path)
            labels = _numbers(archive[found[1]], found[1], path) if found[1] in archive else None
            classes = tuple(str(name) for name in archive["classes"]) if "classes" in archive else ()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable numpy archive ({error})") from error
    if labels is not None and len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
    return from_arrays(path.name, images, labels, classes)


def _numbers(labels: np.ndarray, name: str, path: Path) -> Tensor:
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: {name} (labels) must be whole numbers, got {labels.dtype}")
    return torch.from_numpy(labels.astype(np.int64).ravel())


def _channels_first(array: np.ndarray, path: Path) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise UserError(f"{path}: images must be uint8 with 3 or 4 axes, got {array.dtype} {array.shape}")
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[-1] < array.shape[1]:  # channels last
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(array))


def from_folder(root: Path, split: Split, channels: int = 3) -> Source | None:
    """Image files at any depth. Labels exist when every file lies in one of two or more class folders."""
    folder = _split_folder(root, split)
    if folder is None:
        return None
    files = sorted(_image_files(folder))
    # The training folders number the classes, so that a class that is missing in the test does not shift the others.
    classes = tuple(sorted(_subfolders(_split_folder(root, "train") or root)))
    labels = _labels_by_folder(files, folder, classes)
    paths = np.array(files, dtype=np.str_)  # one block of memory, which worker processes share
    return Source(
        folder.name if folder == root else f"{root.name}/{folder.name}",
        len(files),
        lambda i: decode(Path(str(paths[i])), channels),
        labels=labels,
        classes=classes if labels is not None else (),
        names=lambda i: str(Path(str(paths[i])).relative_to(folder)),
    )


def _labels_by_folder(files: list[str], folder: Path, classes: tuple[str, ...]) -> Tensor | None:
    tops = [Path(file).relative_to(folder).parts[:-1][:1] for file in files]
    if len(classes) < 2 or not all(tops):
        return None
    number = {name: i for i, name in enumerate(classes)}
    unknown = {top[0] for top in tops} - number.keys()
    if unknown:
        raise UserError(f"{folder / min(unknown)}: a class that has no training folder")
    return torch.tensor([number[top[0]] for top in tops])


def _subfolders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}


def _split_folder(root: Path, split: Split) -> Path | None:
    """root/train and root/test (or val, ...), if splits are all that root holds; else the whole is for training."""
    inside = _subfolders(root)
    names = {name for kind in SPLIT_FOLDERS.values() for name in kind}
    if "train" not in inside or not inside <= names:  # a class may be called train
        return root if split == "train" else None
    return next((root / name for name in SPLIT_FOLDERS[split] if name in inside), None)


def _image_files(folder: Path) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, f) for f in files if f[0] != "." and os.path.splitext(f)[1].lower() in SUFFIXES]  # noqa: PTH118, PTH122
    return found


def from_dataset(name: str, dataset: "Dataset[Any]", channels: int = 3) -> Source:
    """Any map-style torch Dataset that gives images, or tuples that begin with an image and its label."""
    labels = next(
        (getattr(dataset, key) for key in ("targets", "labels", "_labels", "y") if hasattr(dataset, key)), None
    )
    labels = None if labels is None else torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    if labels is not None and bool((labels < 0).any()):
        labels = None  # torchvision's mark for unlabelled images
    classes = tuple(str(c) for c in getattr(dataset, "classes", ()))
    array = getattr(dataset, "data", None)
    if isinstance(array, np.ndarray | Tensor) and array.dtype in (np.uint8, torch.uint8):
        return from_arrays(name, _channels_first(np.asarray(array), Path(name)), labels, classes)

    def fetch(index: int) -> Tensor:
        item = dataset[index]
        image = item[0] if isinstance(item, tuple | list) else item
        return image if isinstance(image, Tensor) else pixels(image, channels)

    return Source(name, len(dataset), fetch, labels=labels, classes=classes)  # type: ignore[arg-type]
