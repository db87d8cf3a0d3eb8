"""The interface of all data formats.

A source has a number of images, labels if there are any, and a function that returns an image. Sources whose images
all have one size also provide them as one tensor, which the loader can keep on the device.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.depth import Scaling
from tico_ssl.runtime.randomness import named_generator

Split = Literal["train", "test", "val"]  # val is asked of data that have one, and of nothing else
T = TypeVar("T")
GROUP = 32  # images that are expected together


class Reduced(NamedTuple):
    """Shorter sides in pixels: at which images were packed, and which they had."""

    size: int
    original: int


@dataclass(frozen=True)
class Source:
    """Images, and labels if there are any. `images` is one uint8 tensor (N, C, H, W) where all have one size.

    `fetch` raises BadImage for an unreadable image; `files` returns the path of an image that has its own file,
    `content` the bytes of one that is stored encoded, and raises as `fetch` does; with `mapped` the tensor is
    memory-mapped from disk; `rows` are the indices of this source's images in `images` (None: all, in order), so use
    `take` to get them; `verify` refuses damaged rows before they are used. `identity` identifies an image without
    decoding it: by its pixels if they are in memory, else by its file's path, size and time, and its position in that
    file. `scaling` says how values of more than eight bits became bytes; None if no image has such values. `expect` is
    told which images will be fetched next, where it helps to bring them near together; the others are forgotten.
    `reduced` is known of images that were made smaller when they were packed.
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
    content: Callable[[int], bytes] | None = None
    verify: Callable[[Tensor], None] | None = None
    scaling: Scaling | None = None
    expect: Callable[[Sequence[int]], None] | None = None
    reduced: Reduced | None = None

    def __len__(self) -> int:
        return self.count

    def places(self) -> Iterator[int]:
        """All indices, for whoever fetches one image after the other."""
        expect = self.expect or (lambda some: None)
        try:
            for begin in range(0, self.count, GROUP):
                some = range(begin, min(begin + GROUP, self.count))
                expect(some)
                yield from some
        finally:
            expect(())

    def take(self, index: Tensor) -> Tensor:
        """The images at these indices as one tensor (n, C, H, W), if all have one size."""
        assert self.images is not None
        rows = index if self.rows is None else self.rows[index]
        if self.verify is not None:
            self.verify(rows)
        return self.images[rows]

    def subset(self, index: Tensor) -> "Source":
        """The images at these indices. Mapped images stay on disk; of images in memory, the others can be freed."""
        places = index.numpy()

        def those(call: Callable[[int], T] | None) -> Callable[[int], T] | None:
            return None if call is None else lambda i: call(int(places[i]))

        expect = self.expect
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
            files=those(self.files),
            content=those(self.content),
            rows=rows,
            identity=those(self.identity),
            expect=None if expect is None else lambda some: expect(places[list(some)].tolist()),
        )

    def limited(self, limit: int | None) -> "Source":
        """At most `limit` images, spread evenly, so that files sorted by class keep every class."""
        if limit is None or limit >= self.count:
            return self
        return self.subset(spread_evenly(self.count, limit))

    def fingerprint(self) -> str | None:
        """A digest of these images in this order. None if they have no identity: then nothing computed from them can be
        cached."""
        if self.identity is None:
            return None
        digest = hashlib.sha256()
        for place in range(self.count):
            digest.update(self.identity(place))
        return digest.hexdigest()[:16]

    def labelled_fingerprint(self) -> str | None:
        """A digest of the images and of their labels and classes: results depend on these, features do not."""
        labels = None if self.labels is None else digest_of_numbers(self.labels)
        return joint_digest([self.fingerprint(), json.dumps([labels, self.classes])])


def digest_of_numbers(numbers: Tensor) -> str:
    """A digest of whole numbers and the shape that they are in."""
    values = np.ascontiguousarray(numbers.numpy(), np.int64)
    return hashlib.sha256(f"{values.shape}\0".encode() + values.tobytes()).hexdigest()[:16]


def joint_digest(digests: Sequence[str | None]) -> str | None:
    """One digest of several. None if one of them is not known."""
    return None if None in digests else hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def spread_evenly(count: int, most: int) -> Tensor:
    """Places of at most so many of `count` images in an order that may be sorted by class: one of each of as many equal
    parts, drawn at random, since those at equal distances may all be of one class where classes take turns. The same
    numbers give the same places."""
    begins = evenly_spaced(count, most)
    ends = torch.cat([begins[1:], torch.tensor([count])])[: len(begins)]
    drawn = torch.rand(len(begins), generator=named_generator(0, "sample"), dtype=torch.float64)
    return begins + (drawn * (ends - begins)).long()


def evenly_spaced(count: int, most: int) -> Tensor:
    """Places of at most so many of `count` images at equal distances, for what must stay as earlier versions had it."""
    chosen = min(count, most)
    return torch.arange(chosen) * count // max(1, chosen)


def meant(split: Split, there: Collection[Split]) -> Split | None:
    """The split to open of those that are there: images to test on are those of validation where there are no others.
    None if there are none either."""
    if split == "test" and split not in there:
        split = "val"
    return split if split in there else None


def file_identity(path: Path, place: int | None = None) -> bytes:
    """The identity of an image that is a file or a position in one."""
    try:
        status = path.stat()
        known = f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        known = "missing"
    return os.fsencode(path.absolute()) + f"\0{known}\0".encode() + (b"" if place is None else b"%d\0" % place)


def joined(sources: Sequence[Source]) -> Source:
    """Several sources as one. Labels are kept if all have one per image; classes of the same name are one class."""
    if len(sources) == 1:
        return sources[0]
    ends = np.cumsum([len(source) for source in sources])

    def each(calls: Sequence[Callable[[int], T] | None]) -> Callable[[int], T] | None:
        """A function of each source's indices as one over all indices; None unless all sources have it."""
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return None

        def ask(place: int) -> T:
            number = int(np.searchsorted(ends, place, side="right"))
            return known[number](place - (int(ends[number - 1]) if number else 0))

        return ask

    def expect(places: Sequence[int]) -> None:
        for number, source in enumerate(sources):
            begin = int(ends[number - 1]) if number else 0
            if source.expect is not None:
                source.expect([i - begin for i in places if begin <= i < ends[number]])

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
        content=each([source.content for source in sources]),
        identity=each([source.identity for source in sources]),
        expect=expect if any(source.expect is not None for source in sources) else None,
        reduced=min((source.reduced for source in sources if source.reduced is not None), default=None),
    )


def _full_name(source: Source, place: int) -> str:
    return f"{source.name}/{source.names(place)}" if source.name else source.names(place)


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
