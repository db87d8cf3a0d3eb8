"""Which store the images of a recipe get: a folder of the cache, memory, or none.

What is on disk serves later commands too, and is as fast as memory while memory is free for it.
"""

import hashlib
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.backing import InMemory, OnDisk
from tico_ssl.data.remote.urls import is_url
from tico_ssl.data.source import Source, Split
from tico_ssl.data.sources import open_source
from tico_ssl.data.store import Store, estimated_bytes
from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.memory import free_memory

FREE_SHARE = 0.5  # of the memory that is free when a store is made
SPARE = 1.25  # room for so many times the estimated size
VERSION = 2  # of what is on disk


def store_for(
    source: Source,
    config: DataConfig,
    channels: int,
    shorter: int | None,
    fill: bool = True,
    alone: bool = True,
    note: Callable[[str], None] = lambda reason: None,
) -> Store | None:
    """A store for the images of a source, if they are encoded and fit. Images that a caller's own code makes may be
    others each time. Without `fill` it is only read; if not `alone`, other processes of this command need the same
    images, which memory is not shared with. Why there is none is noted."""
    if config.store == "none" or source.content is None or len(source) == 0:
        return None
    shorter = shorter if config.reduced_decoding else None
    if config.store != "memory" and (store := _on_disk(source, config, channels, shorter, fill)) is not None:
        return store
    if not fill or not alone or config.store == "disk":
        return None
    size, room = estimated_bytes(source), round(FREE_SHARE * free_memory())
    if SPARE * size < room or config.store == "memory":
        return Store(source, channels, InMemory(min(round(SPARE * size), room)), shorter, expected=size)
    note(f"about {size / 1e9:,.0f} GB of decoded images fit neither into the cache (`tico cache`) nor into memory")
    return None


def open_stored(
    config: DataConfig, split: Split, channels: int, shorter: int | None, fill: bool = True
) -> Source | None:
    """The images of a split as `open_source` has them, from a store if there is room for one."""
    source = open_source(config, split, channels, shorter)
    store = None if source is None else store_for(source, config, channels, shorter, fill)
    return source if store is None else store.stored()


def _on_disk(source: Source, config: DataConfig, channels: int, shorter: int | None, fill: bool) -> Store | None:
    where = _where(config)
    decisive = (VERSION, where, channels, version("pillow"), version("torchvision"))  # decoders may round otherwise
    if source.identity is None or not hasattr(os, "preadv"):
        return None
    try:
        folder = cache_folder.cache_folder() / f"decoded-{hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]}"
        if not (fill or folder.is_dir()):
            return None
        backing = OnDisk(cache_folder.opened(folder.name, f"decoded images of {where}"))
        backing.capacity = backing.bytes + cache_folder.make_room(0, folder)
        store = Store(source, channels, backing, shorter, fill, expected=None if fill else 0)
        needed = round(SPARE * (store.expected - store.bytes)) if fill else 0
        room = cache_folder.make_room(needed, folder)
    except OSError:  # no such folder can be made, or it is another user's
        return None
    backing.capacity = backing.bytes + room  # others may fill it too
    if needed <= room or config.store == "disk" or not fill:
        return store
    backing.close()
    if not store.found:  # there is nothing but the images that were decoded to estimate the size
        cache_folder.remove(folder)
    return None


def _where(config: DataConfig) -> str:
    """The data of a recipe by paths that do not depend on the working folder."""
    places = [config.source] if isinstance(config.source, str) else config.source
    paths = [(place, Path(place).expanduser()) for place in places]
    known = [path if path.exists() else Path(config.root) / place for place, path in paths]
    return " + ".join(
        place if is_url(place) else str(path.resolve()) for place, path in zip(places, known, strict=True)
    )
