"""What every kind of data looks like from outside.

A source knows how many images it has, their labels if they have any, and how to give one of them. Sources whose images
are all of one size also hold them as one tensor, which the loader can keep on the device.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

Split = Literal["train", "test"]
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Images, and labels if there are any. `images` is one uint8 tensor (N, C, H, W) where all have one size.

    `fetch` raises BadImage for an image that cannot be read; `files` says where an image lies, if it has its own file;
    `mapped` images are on disk, whatever the tensor pretends; `rows` are the places in `images` of this source's
    images (None: all, in order), so `take` is the way to get at them. `identity` tells an image from all others without
    decoding it: its pixels where they are in memory, else its file's path, size and time, and its place in that file.
    """

    name: str
    count: int
    fetch: Callable[[int], Tensor]
    images: Tensor | None = None
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    names: Callable[[int], str] = field(default=str)
    files: Callable[[int], Path] | None = None
    mapped: bool = False
    rows: Tensor | None = None
    identity: Callable[[int], bytes] | None = None

    def __len__(self) -> int:
        return self.count

    def take(self, index: Tensor) -> Tensor:
        """The images at these places as one tensor (n, C, H, W), where all have one size."""
        assert self.images is not None
        return self.images[index if self.rows is None else self.rows[index]]

    def subset(self, index: Tensor) -> "Source":
        """The images at these places. What is mapped stays on disk; of what is in memory, the rest can go."""
        places, files, identity = index.numpy(), self.files, self.identity
        if self.mapped:
            images, rows = self.images, index if self.rows is None else self.rows[index]
        else:
            images, rows = None if self.images is None else self.take(index), None
        return replace(
            self,
            count=len(places),
            fetch=lambda i: self.fetch(int(places[i])),
            images=images,
            labels=None if self.labels is None else self.labels[index],
            names=lambda i: self.names(int(places[i])),
            files=None if files is None else lambda i: files(int(places[i])),
            rows=rows,
            identity=None if identity is None else lambda i: identity(int(places[i])),
        )

    def limited(self, limit: int | None) -> "Source":
        """At most `limit` images, evenly spaced, so that files sorted by class keep every class."""
        if limit is None or limit >= self.count:
            return self
        return self.subset(torch.arange(limit) * self.count // limit)

    def fingerprint(self) -> str | None:
        """A digest of these images in this order. None where nothing identifies them: what is made of such images
        cannot be kept for the next time."""
        if self.identity is None:
            return None
        digest = hashlib.sha256()
        for place in range(self.count):
            digest.update(self.identity(place))
        return digest.hexdigest()[:16]


def file_identity(path: Path, place: int | None = None) -> bytes:
    """What identifies an image that is a file, or that lies at some place in one."""
    try:
        status = path.stat()
        known = f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        known = "missing"
    return os.fsencode(path) + f"\0{known}\0".encode() + (b"" if place is None else b"%d\0" % place)


def joined(sources: Sequence[Source]) -> Source:
    """Several sources as one. Labels are kept when all have one an image; classes of one name are one class."""
    if len(sources) == 1:
        return sources[0]
    ends = np.cumsum([len(source) for source in sources])

    def each(calls: Sequence[Callable[[int], T] | None]) -> Callable[[int], T] | None:
        """What each source says of its own places, over the places of all; None unless all have something to say."""
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return None

        def ask(place: int) -> T:
            number = int(np.searchsorted(ends, place, side="right"))
            return known[number](place - (int(ends[number - 1]) if number else 0))

        return ask

    fetch, names = each([source.fetch for source in sources]), each([partial(_full_name, source) for source in sources])
    assert fetch is not None
    assert names is not None
    labels, classes = _joined_labels(sources)
    return Source(
        " + ".join(source.name for source in sources),
        int(ends[-1]),
        fetch,
        labels=labels,
        classes=classes,
        names=names,
        files=each([source.files for source in sources]),
        identity=each([source.identity for source in sources]),
    )


def _full_name(source: Source, place: int) -> str:
    return f"{source.name}/{source.names(place)}"


def _joined_labels(sources: Sequence[Source]) -> tuple[Tensor | None, tuple[str, ...]]:
    if any(source.labels is None or source.labels.ndim > 1 or not source.classes for source in sources):
        return None, ()
    classes = tuple(sorted({name for source in sources for name in source.classes}))
    number = {name: i for i, name in enumerate(classes)}
    labels = []
    for source in sources:
        assert source.labels is not None
        labels.append(torch.tensor([number[name] for name in source.classes])[source.labels])
    return torch.cat(labels), classes
