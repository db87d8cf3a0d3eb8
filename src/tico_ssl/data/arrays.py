"""Images that are in memory: numpy files, and torch data sets."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError


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
    return _one_or_several(torch.from_numpy(labels.astype(np.int64)))


def _one_or_several(labels: Tensor) -> Tensor:
    """One label an image (N), also where they stand in a column, or several (N, classes)."""
    return labels if labels.ndim == 2 and labels.shape[1] > 1 else labels.ravel()


def _channels_first(array: np.ndarray, path: Path) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise UserError(f"{path}: images must be uint8 with 3 or 4 axes, got {array.dtype} {array.shape}")
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[-1] < array.shape[1]:  # channels last
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(array))


def from_dataset(name: str, dataset: "Dataset[Any]", reading: Reading = IN_FULL) -> Source:
    """Any map-style torch Dataset that gives images, or tuples that begin with an image and its label."""
    labels = next(
        (getattr(dataset, key) for key in ("targets", "labels", "_labels", "y") if hasattr(dataset, key)), None
    )
    labels = None if labels is None else _one_or_several(torch.as_tensor(np.asarray(labels), dtype=torch.int64))
    if labels is not None and labels.ndim == 1 and bool((labels < 0).any()):
        labels = None  # torchvision's mark for unlabelled images; of several classes, -1 says that one is not there
    classes = tuple(str(c) for c in getattr(dataset, "classes", ()))
    array = getattr(dataset, "data", None)
    if isinstance(array, np.ndarray | Tensor) and array.dtype in (np.uint8, torch.uint8):
        return from_arrays(name, _channels_first(np.asarray(array), Path(name)), labels, classes)

    def fetch(index: int) -> Tensor:
        item = dataset[index]
        image = item[0] if isinstance(item, tuple | list) else item
        return image if isinstance(image, Tensor) else reading.pixels(image)

    return Source(name, len(dataset), fetch, labels=labels, classes=classes)  # type: ignore[arg-type]
