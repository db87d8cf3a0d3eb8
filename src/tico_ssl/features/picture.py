"""The data that the report draws of an embedding, as plain arrays."""

from dataclasses import dataclass

import numpy as np

NEIGHBOURS = 8  # per image in the gallery
MOST_COLOURS = 24  # distinguishable classes on a map
VOTERS = 20  # k of the kNN classifier


@dataclass(frozen=True)
class Images:
    """Images of a source: names, classes (or None), thumbnails (n, side, side, 3)."""

    names: list[str]
    labels: np.ndarray | None
    thumbnails: np.ndarray


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn of an embedding. Points and gallery have their own images."""

    data: str
    classes: list[str]
    points: Images
    positions: np.ndarray
    clusters: np.ndarray | None
    how: str
    queries: Images
    neighbours: Images
    similarity: np.ndarray
    confusion: np.ndarray | None
    """Confusion matrix in images: row true class, column predicted class."""
