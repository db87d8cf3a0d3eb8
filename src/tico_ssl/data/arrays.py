"""Sources from arrays in memory and from torch data sets."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tico_ssl.data import bands
from tico_ssl.data.decoding import IN_FULL, Reading
from tico_ssl.data.depth import native
from tico_ssl.data.item_labels import Labels, labels_of
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError


def from_arrays(name: str, images: Tensor, labels: Tensor | None, classes: tuple[str, ...] = ()) -> Source:
    """A source of images in memory."""
    shape = f"{tuple(images.shape[1:])}\0".encode()

    def identity(place: int) -> bytes:
        return shape + images[place].contiguous().numpy().tobytes()

    return Source(name, len(images), images.__getitem__, images, labels, classes, identity=identity)


def channels_first(array: np.ndarray, where: str | Path, channels: int) -> Tensor:
    """Images of one size as a tensor (N, C, H, W): the axis of channels is the one of this size, else the smaller one.
    `where` is for the error message."""
    if array.dtype.kind not in "uif" or array.dtype.itemsize > 8 or array.ndim not in (3, 4):
        raise UserError(f"{where}: images must be numbers with 3 or 4 axes, got {array.dtype} {array.shape}")
    if array.ndim == 3:
        array = array[:, None]
    elif (array.shape[1] != channels, array.shape[1]) > (array.shape[-1] != channels, array.shape[-1]):
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(native(array)))


def from_dataset(
    name: str, dataset: "Dataset[Any]", reading: Reading = IN_FULL, labelled: Labels | None = None
) -> Source:
    """Any map-style torch Dataset, or list, of images or of tuples that start with image and label. `labelled` are its
    labels and classes, if they are known."""
    labels, classes = labels_of(dataset) if labelled is None else labelled
    array = getattr(dataset, "data", None)
    if isinstance(array, np.ndarray | Tensor) and array.dtype in (np.uint8, torch.uint8):
        return from_arrays(name, channels_first(np.asarray(array), name, reading.channels), labels, classes)

    def fetch(index: int) -> Tensor:
        item = dataset[index]
        return _picture(item[0] if isinstance(item, tuple | list) and item else item, reading, f"{name}: item {index}")

    return Source(name, len(dataset), fetch, labels=labels, classes=classes)  # type: ignore[arg-type]


def _picture(image: Any, reading: Reading, where: str) -> Tensor:
    """What a program has for an image: a tensor, an array, a Pillow image or the path of a file."""
    if isinstance(image, str | Path):
        return reading.decode(Path(image).expanduser())
    if not isinstance(image, Tensor | np.ndarray | Image.Image):
        raise UserError(f"{where} is {type(image).__name__}: an image is a path, a Pillow image, an array or a tensor")
    try:
        if isinstance(image, Image.Image):
            return reading.pixels(image)
        if isinstance(image, Tensor):
            image = (image.float() if image.dtype == torch.bfloat16 else image).numpy(force=True)
        return bands.of_stack(image, reading.channels)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error
