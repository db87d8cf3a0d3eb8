"""What is found in a set of images. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    from tico_ssl.looking_up.index import Index


@dataclass(frozen=True)
class Scored:
    """An image that was found: `name` is that of its class, empty if there is none, `place` its number among all."""

    path: str
    split: str
    name: str
    score: float
    place: int


@dataclass(frozen=True)
class Found:
    """The nearest images of a query, nearest first."""

    query: str
    matches: list[Scored]


@dataclass(frozen=True)
class Threshold:
    """The cosine from which images are near-duplicates, and where it comes from."""

    cosine: float
    rule: str


@dataclass(frozen=True)
class Curation:
    """What was found in a set of images."""

    data: str
    images: int
    threshold: Threshold
    nearest: list[float] = field(repr=False)
    """Cosine of every image to its nearest neighbour."""
    neighbours: int
    groups: list[list[Scored]]
    """Near-duplicates, those that are most alike first."""
    outliers: list[Scored]
    """All images, the most unusual first."""
    unusual: int
    """How many of these are outliers by the rule."""
    subset: list[Scored] | None

    def lines(self) -> list[str]:
        """The findings in words."""
        alike = f"{self.copies:,} in {counted(len(self.groups), 'group')}" if self.groups else "none"
        found = [
            f"images     {self.images:,} of {self.data}",
            f"duplicates {alike}, by a cosine of {self.threshold.cosine:.6f}",
        ]
        if self.across_splits:
            groups = counted(self.across_splits, "group")
            found.append(f"           in more than one split: {groups}, so tests may know the answer")
        if self.across_classes:
            groups = counted(self.across_classes, "group")
            found.append(f"           in more than one class: {groups}, so labels may be wrong")
        unusual = f"{self.unusual:,}" if self.unusual else "none"
        found.append(f"outliers   {unusual}, the most unusual image {self.outliers[0].path}")
        if self.subset is not None:
            far = self.subset[-1].score
            found.append(f"subset     {len(self.subset):,}; the last was {far:.4f} (1 - cosine) from those before it")
        return found

    @property
    def copies(self) -> int:
        """Images that are in a group."""
        return sum(map(len, self.groups))

    @property
    def across_splits(self) -> int:
        """Groups with images of more than one split."""
        return sum(len({member.split for member in group}) > 1 for group in self.groups)

    @property
    def across_classes(self) -> int:
        """Groups with images of more than one class."""
        return sum(len({member.name for member in group}) > 1 for group in self.groups)


def scored(index: "Index", rows: Sequence[int], scores: Sequence[float]) -> list[Scored]:
    """The images of some rows."""
    album, places = index.album, [int(index.places[row]) for row in rows]
    return [
        Scored(album.path(place), album.split(place), album.class_of(place), score, place)
        for place, score in zip(places, scores, strict=True)
    ]
