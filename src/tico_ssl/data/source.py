"""What every kind of data looks like from outside.

A source knows how many images it has, their labels if they have any, and how to give one of them. Sources whose images
are all of one size also hold them as one tensor, which the loader can keep on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Source:
    """Images, and labels if there are any. `images` is one uint8 tensor (N, C, H, W) where all have one size.

    `fetch` raises BadImage for an image that cannot be read; `files` says where an image lies, if it has its own file;
    `mapped` images are on disk, whatever the tensor pretends; `rows` are the places in `images` of this source's
    images (None: all, in order), so `take` is the way to get at them.
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

    def __len__(self) -> int:
        return self.count

    def take(self, index: Tensor) -> Tensor:
        """The images at these places as one tensor (n, C, H, W), where all have one size."""
        assert self.images is not None
        return self.images[index if self.rows is None else self.rows[index]]

    def subset(self, index: Tensor) -> "Source":
        """The images at these places. What is mapped stays on disk; of what is in memory, the rest can go."""
        places, files = index.numpy(), self.files
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
        )

    def limited(self, limit: int | None) -> "Source":
        """At most `limit` images, evenly spaced, so that files sorted by class keep every class."""
        if limit is None or limit >= self.count:
            return self
        return self.subset(torch.arange(limit) * self.count // limit)


def joined(sources: Sequence[Source]) -> Source:
    """Several sources as one. Labels are kept when all have one an image; classes of one name are one class."""
    if len(sources) == 1:
        return sources[0]
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + len(source))

    def at(place: int) -> tuple[Source, int]:
        number = next(i for i in range(len(sources)) if place < starts[i + 1])
        return sources[number], place - starts[number]

    labels, classes = _joined_labels(sources)
    files = None
    if all(source.files is not None for source in sources):

        def files(place: int) -> Path:
            source, inside = at(place)
            assert source.files is not None
            return source.files(inside)

    def fetch(place: int) -> Tensor:
        source, inside = at(place)
        return source.fetch(inside)

    def names(place: int) -> str:
        source, inside = at(place)
        return f"{source.name}/{source.names(inside)}"

    return Source(" + ".join(s.name for s in sources), starts[-1], fetch, None, labels, classes, names, files)


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
