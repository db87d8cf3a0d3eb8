"""The features of a set of images, each of length one, in the cache: the second search begins at once."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tico_ssl.data.sources import shown
from tico_ssl.features.album import Album, open_album
from tico_ssl.features.feature_store import FLOAT, FeatureStore, fill, opened_store, store_key
from tico_ssl.features.subjects import Subject
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.device import autocast
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.locks import InUse
from tico_ssl.runtime.progress import say

PATIENCE = 0.5  # seconds between two looks whether another command is done


@dataclass(frozen=True)
class Index:
    """Unit features (n, width) of the readable images of an album, mapped from the disk."""

    album: Album
    places: Tensor
    """The image of each row."""
    rows: Tensor
    bad: dict[int, str]
    """Images that cannot be read, and why."""


@contextmanager
def opened_index(
    subject: Subject, device: torch.device, split: str, dtype: torch.dtype = torch.float32
) -> Iterator[Index]:
    """The index of a subject's images. It is valid within: meanwhile the cache keeps it."""
    backbone = subject.backbone
    album = open_album(subject.data, backbone.config.channels, split)
    images = album.fingerprint()
    key = store_key(backbone, images, device, dtype, unit=True)
    what = f"features of {shown(subject.data)} under {backbone.config.name}"
    with ExitStack() as stack:
        folder = _cached(stack, key, what, len(album) * backbone.width * FLOAT) if images else None
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tico-")))
        store = _filled(folder, key, album, backbone, device, dtype)
        yield Index(album, store.places(), store.matrix(), store.bad)


def _filled(
    folder: Path, key: str, album: Album, backbone: Backbone, device: torch.device, dtype: torch.dtype
) -> FeatureStore:
    """A store with the features of all images. If another command computes them, they are waited for."""
    said = False
    while True:
        try:
            with opened_store(folder, key, backbone.width) as store:
                fill(store, album, backbone, device, dtype, unit=True)
                return store
        except InUse as error:
            if not said:
                say(f"{error}; waiting for it")
            said = True
            time.sleep(PATIENCE)


def _cached(stack: ExitStack, key: str, what: str, size: int) -> Path | None:
    """A folder of the cache with room for so many bytes, kept until the stack ends; None if there is none."""
    try:
        folder = cache_folder.opened(f"features-{key}", what)
        stack.enter_context(cache_folder.held(folder))
        there = sum(file.stat().st_size for file in folder.iterdir())
        if cache_folder.make_room(size - there, folder) >= size - there:
            return folder
        reason = f"{size / 1e9:.2g} GB do not fit (`tico cache`)"
    except OSError as error:
        reason = refusal(error) or str(error)
    say(f"features are not cached: {reason}")
    return None


@torch.no_grad()
def features_of(images: list[Tensor], backbone: Backbone, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The features of a few images (C, H, W)."""
    batch = backbone.preprocess(images).to(device)
    with autocast(device, dtype):
        features: Tensor = backbone.eval().to(device)(batch)
    return features.float().cpu()
