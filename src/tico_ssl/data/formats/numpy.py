"""A numpy file: .npy with images, or .npz with images and labels, of one split or two."""

import os
import zipfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import channels_first, from_arrays
from tico_ssl.data.decoding import Reading
from tico_ssl.data.item_labels import one_or_several
from tico_ssl.data.source import Source, Split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

ENDINGS = (".npz", ".npy")


def matches(place: str) -> bool:
    """A numpy file."""
    path = Path(place).expanduser()
    return path.suffix in ENDINGS and path.is_file()


def splits(place: str) -> dict[Split, str]:
    """Those that the names of arrays tell."""
    path = Path(place).expanduser()
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
    return {split: "" for split in get_args(Split) if split == "train" or f"x_{split}.npy" in names}


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """All images in memory."""
    return from_numpy(Path(place).expanduser(), split, reading.channels)


def from_numpy(path: Path, split: Split, channels: int) -> Source | None:
    """`.npy`: images. `.npz`: x_train/y_train/x_test/y_test, or images/labels. Channels first, last or absent."""
    if path.suffix == ".npy" and split != "train":
        return None
    try:
        _require_memory(path)
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray) != (path.suffix == ".npy"):
            raise UserError(f"{path}: its content does not match its suffix (.npy, .npz)")
        if isinstance(loaded, np.ndarray):
            return from_arrays(path.name, channels_first(loaded, path, channels), None)
        with loaded as archive:
            other = {"train": ("images", "labels"), "test": ("x_val", "y_val")}  # validation is a test without another
            pairs = [(f"x_{split}", f"y_{split}"), *([other[split]] if split in other else [])]
            found = next((pair for pair in pairs if pair[0] in archive), None)
            if found is None:
                if split != "train":
                    return None
                raise UserError(
                    f"{path}: needs arrays x_train (and y_train) or images (and labels), has {archive.files}"
                )
            images = channels_first(archive[found[0]], path, channels)
            labels = _numbers(archive[found[1]], found[1], path) if found[1] in archive else None
            classes = tuple(str(name) for name in archive["classes"]) if "classes" in archive else ()
    except UserError:
        raise
    except Exception as error:  # a damaged or crafted archive fails in many ways
        raise UserError(f"{path}: not a readable numpy archive ({error or type(error).__name__})") from error
    if labels is not None and len(labels) != len(images):
        raise UserError(f"{path}: {counted(len(images), 'image')} but {counted(len(labels), 'label')}")
    return from_arrays(path.name, images, labels, classes)


def _require_memory(path: Path) -> None:
    """Refuse a file whose arrays, which an archive may have compressed a thousandfold, exceed the machine's memory."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = max((member.file_size for member in archive.infolist()), default=0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    if memory is not None and size > memory:
        raise UserError(f"{path}: an array of {size / 2**30:,.1f} GiB does not fit into memory; pack its images")


def _numbers(labels: np.ndarray, name: str, path: Path) -> Tensor:
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim > 2:
        raise UserError(f"{path}: {name} (labels) must be whole numbers, got {labels.dtype} {labels.shape}")
    if labels.dtype == np.uint64 and labels.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{path}: {name} (labels) has a number of {labels.max()}")
    return one_or_several(torch.from_numpy(labels.astype(np.int64)))
