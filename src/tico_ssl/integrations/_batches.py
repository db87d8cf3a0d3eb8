"""Batches as data loaders make them: images or views, alone or with labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from tico_ssl.runtime.errors import UserError

KEYS = {"images", "views", "label", "index"}


@dataclass(frozen=True)
class Given:
    """A batch as given: uint8 images from which views are to be made, or the views themselves."""

    images: Tensor | list[Tensor] | None
    views: tuple[Tensor, ...]
    label: Tensor | None = None
    index: Tensor | None = None

    @property
    def count(self) -> int:
        """How many images."""
        return len(self.views[0] if self.images is None else self.images)


def read_batch(given: Any) -> Given:
    """One tensor of images, several tensors (views, or images of different sizes), either followed by labels, or a
    mapping with `images` or `views` and perhaps `label` and `index`."""
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if isinstance(given, Tensor):
        given = (given,)
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"a batch is a tensor of images, a list of views or a mapping, not {type(given).__name__}")
    if isinstance(given[0], Sequence) and not isinstance(given[0], str):
        pictures, rest = list(given[0]), given[1:]
    else:
        pictures = list(takewhile(_is_picture, given))
        rest = given[len(pictures) :]
    label = next((item for item in rest if isinstance(item, Tensor)), None)
    return _sorted(pictures, label, None)


def _from_mapping(given: Mapping[str, Any]) -> Given:
    if unknown := given.keys() - KEYS:
        raise UserError(f"a batch has {', '.join(sorted(KEYS))}, not '{sorted(unknown)[0]}'")
    pictures = given.get("views", given.get("images"))
    if pictures is None:
        raise UserError("a batch needs images or views")
    pictures = [pictures] if isinstance(pictures, Tensor) else list(pictures)
    return _sorted(pictures, given.get("label"), given.get("index"))


def _sorted(pictures: list[Any], label: Tensor | None, index: Tensor | None) -> Given:
    """Images are uint8, views are normalised floats of the same images in the same order."""
    if not pictures or not all(_is_picture(picture) for picture in pictures):
        raise UserError("a batch begins with images (uint8) or views (floats): tensors of three dimensions or more")
    first = pictures[0]
    if all(picture.dtype == torch.uint8 for picture in pictures):
        if len(pictures) == 1 and first.ndim == 4:
            return Given(first, (), label, index)
        if all(picture.ndim == 3 for picture in pictures):
            return Given(pictures, (), label, index)
        raise UserError("uint8 images are one tensor (N, C, H, W), or tensors (C, H, W) of any sizes; views are floats")
    if any(not picture.is_floating_point() or picture.ndim < 4 or len(picture) != len(first) for picture in pictures):
        raise UserError("views are tensors of normalised floats (N, C, H, W), all of the same images")
    return Given(None, tuple(pictures), label, index)


def _is_picture(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim >= 3
