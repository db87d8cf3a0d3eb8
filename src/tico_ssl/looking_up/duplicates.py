"""Near-duplicates: groups of images that are connected by pairs with a cosine of at least a threshold."""

import math

import numpy as np
import torch
from torch import Tensor

from tico_ssl.looking_up.findings import Threshold
from tico_ssl.runtime.progress import track

ROWS, COLUMNS = 1_024, 4_096  # of a block of cosines
RARE = 0.005  # share of ordinary images whose nearest neighbour is taken for a copy
CLOSEST = 1e-6  # cosine distance: nearer ones are the same but for rounding


def chosen_threshold(nearest: Tensor) -> Threshold:
    """From the cosine of every image to its nearest neighbour.

    The distance, 1 - cosine, to the nearest of many points has a Weibull distribution: P(distance < d) = 1 - exp(-(d /
    scale)^shape). The median and the upper quartile determine both numbers; images with a copy, which have the smallest
    distances, move them little. The threshold is the distance below which one ordinary image in 200 would have its
    nearest neighbour:

        log d = median - (upper quartile - median) * log2(ln 2 / RARE), quartiles being those of log distances

    Without the images below it, the same is done again, until there are none.
    """
    ordinary = (1 - nearest.double()).clamp_min(CLOSEST).log()
    while True:
        middle, upper = (float(value) for value in ordinary.quantile(ordinary.new_tensor([0.5, 0.75])))
        cut = middle - (upper - middle) * math.log2(math.log(2) / RARE)
        if not (ordinary < cut).any():
            break
        ordinary = ordinary[ordinary >= cut]
    rule = f"{RARE:.1%} of ordinary images would be so near to their nearest neighbour"
    return Threshold(1 - max(math.exp(cut), CLOSEST), rule)


@torch.no_grad()
def groups(rows: Tensor, nearest: Tensor, threshold: float, device: torch.device) -> list[list[int]]:
    """Groups of rows, each with at least two, in the order of their first row. `rows` have length one; `nearest` is the
    cosine of each to its nearest neighbour: only rows that have one near enough are compared. Rounding keeps no image
    from its exact copy."""
    threshold = min(threshold, 1 - CLOSEST)
    candidates = (nearest >= threshold).nonzero().ravel()
    pieces = [rows[part].to(device) for part in candidates.split(ROWS)]
    member = np.arange(len(candidates))
    for number, piece in enumerate(track(pieces, len(pieces), "near-duplicates")):
        begin = number * ROWS
        for first in range(begin, len(candidates), COLUMNS):
            others = torch.cat(pieces[first // ROWS : first // ROWS + COLUMNS // ROWS])
            found = (piece @ others.T >= threshold).nonzero().cpu().numpy()
            member = _joined(member, begin + found[:, 0], first + found[:, 1])
    order = np.argsort(member, kind="stable")
    parts = np.split(candidates.numpy()[order], np.flatnonzero(np.diff(member[order])) + 1)
    return sorted(part.tolist() for part in parts if len(part) > 1)


def _joined(member: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Components after some pairs were connected."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(member)
    a, b = member[one], member[other]
    new = a != b
    if not new.any():
        return member
    edges = coo_array((np.ones(int(new.sum()), dtype=np.int8), (a[new], b[new])), shape=(count, count))
    component: np.ndarray = connected_components(edges, directed=False)[1]
    joined: np.ndarray = component[member]
    return joined
