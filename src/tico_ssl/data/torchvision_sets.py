"""torchvision's data sets by name, with the arguments that choose their training and test images."""

from typing import Any

from torch.utils.data import Dataset
from torchvision import datasets

from tico_ssl.runtime.errors import UserError

_BY_FLAG = ({"train": True}, {"train": False})
_BY_SPLIT = ({"split": "train"}, {"split": "test"})

# name: (class, arguments of the training split, arguments of the test split)
SETS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "cifar10": (datasets.CIFAR10, *_BY_FLAG),
    "cifar100": (datasets.CIFAR100, *_BY_FLAG),
    "mnist": (datasets.MNIST, *_BY_FLAG),
    "fashion-mnist": (datasets.FashionMNIST, *_BY_FLAG),
    "svhn": (datasets.SVHN, *_BY_SPLIT),
    "stl10": (datasets.STL10, *_BY_SPLIT),
    "stl10-unlabelled": (datasets.STL10, {"split": "train+unlabeled"}, {"split": "test"}),
    "flowers102": (datasets.Flowers102, *_BY_SPLIT),
    "food101": (datasets.Food101, *_BY_SPLIT),
    "oxford-pets": (datasets.OxfordIIITPet, {"split": "trainval"}, {"split": "test"}),
    "dtd": (datasets.DTD, *_BY_SPLIT),
    "imagenette": (datasets.Imagenette, {"split": "train"}, {"split": "val"}),
    "imagenet": (datasets.ImageNet, {"split": "train"}, {"split": "val"}),
}


def open_torchvision(name: str, split: str, root: str, download: bool) -> "Dataset[Any]":
    """A data set that lies under `root`, or that may be fetched to there."""
    kind, train, test = SETS[name]
    arguments = dict(train if split == "train" else test)
    if name != "imagenet":  # which nobody may fetch without an account
        arguments["download"] = download
    try:
        return kind(root, **arguments)
    except (RuntimeError, OSError) as error:
        hint = "" if download or name == "imagenet" else "; fetch it with data.download=true"
        raise UserError(
            f"data set '{name}' is not complete under '{root}'{hint} ({str(error).splitlines()[0]})"
        ) from error
