"""The labels of a data set in a Python program: those that it lists, else those of its items."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from tico_ssl.runtime.progress import track

LISTED = ("targets", "labels", "_labels", "y")  # attributes of data sets that list their labels
SAMPLES = ("samples", "_samples")  # and their files, each with its label

Labels = tuple[Tensor | None, tuple[str, ...]]
"""One per image (N) or several (N, classes), None without any; and the names of the classes, if they are known."""


def of_items(dataset: Any) -> list[Any] | None:
    """What comes after the image in every item; None if items are images alone."""
    if len(dataset) == 0 or not _is_pair(dataset[0]) or _numbered([dataset[0][1]])[0] is None:
        return None
    return [dataset[place][1] for place in track(range(len(dataset)), len(dataset), "reading labels")]


def labels_of(dataset: Any, read: Callable[[Any], list[Any] | None] = of_items) -> Labels:
    """The labels of a data set. Only if it lists none, those of its items are `read`, images and all."""
    labels, classes = _listed(dataset)
    if labels is None and (found := read(dataset)) is not None:
        labels, classes = _numbered(found)
    if labels is not None and labels.ndim == 1 and bool((labels < 0).any()):
        labels = None  # torchvision's mark for unlabelled images; in multi-label data, -1 means absent
    return labels, classes or _classes(dataset)


def one_or_several(labels: Tensor) -> Tensor:
    """Labels (N,) with one per image, also from a column (N, 1); several per image stay (N, classes)."""
    return labels if labels.ndim == 2 and labels.shape[1] > 1 else labels.ravel()


def _listed(dataset: Any) -> Labels:
    """The labels that an object lists; of a part of another one, those that this lists."""
    if isinstance(dataset, Subset):
        labels, classes = _listed(dataset.dataset)
        return (None if labels is None else labels[torch.as_tensor(dataset.indices)]), classes
    if isinstance(dataset, ConcatDataset):
        known = [_listed(part) for part in dataset.datasets]
        found = [labels for labels, _ in known if labels is not None]
        alike = len({classes for _, classes in known}) == 1  # else a number may mean several classes
        return (torch.cat(found), known[0][1]) if alike and len(found) == len(known) else (None, ())
    classes = _classes(dataset)
    for given in (getattr(dataset, name, None) for name in LISTED):
        if isinstance(given, Sequence) or hasattr(given, "__array__"):  # as tensors and columns of pandas have it
            labels, names = _numbered(given)
            return labels, names or classes
    if isinstance(dataset, TensorDataset):
        return _numbered(list(dataset.tensors[1]) if len(dataset.tensors) > 1 else [])
    for samples in (getattr(dataset, name, None) or [] for name in SAMPLES):
        if all(map(_is_pair, samples[:1])) and samples:
            labels, names = _numbered([sample[1] for sample in samples])
            return labels, names or classes
    return None, classes


def _classes(dataset: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in getattr(dataset, "classes", None) or ())


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) > 1


def _numbered(given: Any) -> Labels:
    """Class numbers as they are, names of classes by their order; None of anything else."""
    if not isinstance(given, Sequence | Tensor):
        given = np.asarray(given)
    if isinstance(given, np.ndarray) and given.dtype.kind in "UO":
        given = given.tolist()
    if isinstance(given, Sequence) and given and all(isinstance(label, str) for label in given):
        classes = tuple(sorted(set(given)))
        number = {name: place for place, name in enumerate(classes)}
        return torch.tensor([number[name] for name in given]), classes
    try:
        array = np.asarray([np.asarray(label) for label in given] if isinstance(given, Sequence) else given)
    except (ValueError, TypeError):  # of different shapes
        return None, ()
    whole = array.dtype.kind in "iub" or (array.dtype.kind == "f" and array.ndim == 1 and bool((array % 1 == 0).all()))
    if not whole or array.ndim not in (1, 2) or not len(array):
        return None, ()
    return one_or_several(torch.from_numpy(array.astype(np.int64))), ()
