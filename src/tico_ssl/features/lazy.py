"""Backbones that are built when they are needed, and an identity that is known before."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tico_ssl.networks.backbones import Backbone


@dataclass(frozen=True)
class LazyBackbone:
    """A backbone of the architecture, input size and normalisation of `like`."""

    like: Backbone
    make: Callable[[], Backbone]
    identify: Callable[[], str | None]
    """A digest of all that determines the weights; None if that cannot be known."""
    folder: Path | None = None
    """Where its features are kept, if not in the folder of the cache."""

    @cached_property
    def identity(self) -> str | None:
        """The digest, computed once: it may take a look at every file."""
        return self.identify()

    @cached_property
    def built(self) -> Backbone:
        """The backbone itself."""
        return self.make()


def ready(backbone: Backbone | LazyBackbone, folder: Path | None = None) -> LazyBackbone:
    """A backbone that is built already, identified by its weights; a lazy one as it is."""
    if isinstance(backbone, LazyBackbone):
        return backbone
    return LazyBackbone(backbone, lambda: backbone, lambda: weights_digest(backbone), folder)


class LazyBackbones(Mapping[str, Backbone]):
    """Backbones by name, each built when it is asked for; `lazy` are the same unbuilt."""

    def __init__(self, given: Mapping[str, Backbone | LazyBackbone]) -> None:
        self.lazy = {name: ready(backbone) for name, backbone in given.items()}

    def __getitem__(self, name: str) -> Backbone:
        return self.lazy[name].built

    def __iter__(self) -> Iterator[str]:
        return iter(self.lazy)

    def __len__(self) -> int:
        return len(self.lazy)


def weights_digest(backbone: Backbone) -> str:
    """Digest of a backbone's parameters, buffers and description."""
    found = hashlib.sha256(json.dumps(described(backbone)).encode())
    for name, value in backbone.state_dict().items():
        found.update(name.encode())
        found.update(memory_of(value))
    return found.hexdigest()[:16]


def described(backbone: Backbone) -> list[Any]:
    """Architecture, input size and normalisation."""
    return [backbone.config.model_dump(mode="json"), backbone.image_size, backbone.mean, backbone.std]


def memory_of(tensor: Tensor) -> Any:
    """A view of the memory that can be hashed without a copy."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
