"""One of torchvision's data sets, under `data.root`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_dataset
from tico_ssl.data.decoding import Reading
from tico_ssl.data.source import Source, Split, file_identity
from tico_ssl.runtime.errors import UserError

_BY_FLAG = ({"train": True}, {"train": False})
_BY_SPLIT = ({"split": "train"}, {"split": "test"})

# name: (torchvision's class, arguments of the training split, arguments of the test split)
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cifar10": ("CIFAR10", *_BY_FLAG),
    "cifar100": ("CIFAR100", *_BY_FLAG),
    "mnist": ("MNIST", *_BY_FLAG),
    "fashion-mnist": ("FashionMNIST", *_BY_FLAG),
    "svhn": ("SVHN", *_BY_SPLIT),
    "stl10": ("STL10", *_BY_SPLIT),
    "stl10-unlabelled": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),
    "flowers102": ("Flowers102", *_BY_SPLIT),
    "food101": ("Food101", *_BY_SPLIT),
    "oxford-pets": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "dtd": ("DTD", *_BY_SPLIT),
    "imagenette": ("Imagenette", {"split": "train"}, {"split": "val"}),
    "imagenet": ("ImageNet", {"split": "train"}, {"split": "val"}),
}

RANK = -1  # a name takes precedence over a folder of the same name
NAMES = tuple(SETS)


def matches(place: str) -> bool:
    """One of the names."""
    return place in SETS


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """One image at a time if torchvision keeps them as files, else all in memory."""
    dataset = open_torchvision(place, split, config.root, config.download)
    source, files = from_dataset(place, dataset, reading), _files(dataset)
    return source if files is None else replace(source, identity=lambda i: file_identity(Path(files[i])))


def _files(dataset: "Dataset[Any]") -> Sequence[str | Path] | None:
    """Paths of the images, under the various attribute names of torchvision's classes."""
    for name in ("_image_files", "_images", "_samples", "samples"):
        if found := getattr(dataset, name, None):
            return [entry[0] if isinstance(entry, tuple) else entry for entry in found]
    return None


def open_torchvision(name: str, split: str, root: str, download: bool) -> "Dataset[Any]":
    """A data set under `root`, downloaded to it if that is allowed."""
    from torchvision import datasets

    kind, train, test = SETS[name]
    arguments = dict(train if split == "train" else test)
    if name != "imagenet":  # which needs an account to download
        arguments["download"] = download
    try:
        opened: Dataset[Any] = getattr(datasets, kind)(root, **arguments)
        return opened
    except (RuntimeError, OSError) as error:
        hint = "" if download or name == "imagenet" else "; download it with data.download=true"
        raise UserError(
            f"data set '{name}' is not complete under '{root}'{hint} ({str(error).splitlines()[0]})"
        ) from error
