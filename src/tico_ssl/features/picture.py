"""What is drawn of an embedding, as plain arrays."""

from dataclasses import dataclass

import numpy as np

NEIGHBOURS = 8  # of each image in the gallery
MOST_COLOURS = 24  # classes that can be told apart on a map
VOTERS = 20  # neighbours that vote on the class of an image


@dataclass(frozen=True)
class Images:
    """Some images of a source: names, class of each (or none), thumbnails (n, side, side, 3)."""

    names: list[str]
    labels: np.ndarray | None
    thumbnails: np.ndarray


@dataclass(frozen=True)
class Picture:
    """All that is drawn of an embedding. Points and gallery have their own images."""

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
    """Test images of each class (row) that were taken for each class (column)."""
