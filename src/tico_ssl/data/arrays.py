"""Sources from arrays in memory and from torch data sets."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.depth import native
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError


def from_arrays(name: str, images: Tensor, labels: Tensor | None, classes: tuple[str, ...] = ()) -> Source:
    """A source of images in memory."""
    shape = f"{tuple(images.shape[1:])}\0".encode()

    def identity(place: int) -> bytes:
        return shape + images[place].contiguous().numpy().tobytes()

    return Source(name, len(images), images.__getitem__, images, labels, classes, identity=identity)


def one_or_several(labels: Tensor) -> Tensor:
    """Labels (N,) with one per image, also from a column (N, 1); several per image stay (N, classes)."""
    return labels if labels.ndim == 2 and labels.shape[1] > 1 else labels.ravel()


def channels_first(array: np.ndarray, where: str | Path) -> Tensor:
    """Images of one size as a tensor (N, C, H, W). `where` is for the error message."""
    if array.dtype.kind not in "uif" or array.dtype.itemsize > 8 or array.ndim not in (3, 4):
        raise UserError(f"{where}: images must be numbers with 3 or 4 axes, got {array.dtype} {array.shape}")
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[-1] < array.shape[1]:  # channels last
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(native(array)))


def from_dataset(name: str, dataset: "Dataset[Any]", reading: Reading = IN_FULL) -> Source:
    """Any map-style torch Dataset of images, or of tuples that start with image and label."""
    labels = next(
        (getattr(dataset, key) for key in ("targets", "labels", "_labels", "y") if hasattr(dataset, key)), None
    )
    labels = None if labels is None else one_or_several(torch.as_tensor(np.asarray(labels), dtype=torch.int64))
    if labels is not None and labels.ndim == 1 and bool((labels < 0).any()):
        labels = None  # torchvision's mark for unlabelled images; in multi-label data, -1 means absent
    classes = tuple(str(c) for c in getattr(dataset, "classes", ()))
    array = getattr(dataset, "data", None)
    if isinstance(array, np.ndarray | Tensor) and array.dtype in (np.uint8, torch.uint8):
        return from_arrays(name, channels_first(np.asarray(array), name), labels, classes)

    def fetch(index: int) -> Tensor:
        item = dataset[index]
        image = item[0] if isinstance(item, tuple | list) else item
        return image if isinstance(image, Tensor) else reading.pixels(image)

    return Source(name, len(dataset), fetch, labels=labels, classes=classes)  # type: ignore[arg-type]
