"""Near-duplicates: groups of images that are connected by pairs with a cosine of at least a threshold."""

import numpy as np
import torch
from torch import Tensor

from tico_ssl.looking_up.findings import Threshold
from tico_ssl.runtime.progress import track

ROWS, COLUMNS = 1_024, 4_096  # of a block of cosines
SPREADS = 5.0
CLOSEST = 1e-6  # cosine distance: nearer ones are the same but for rounding


def chosen_threshold(nearest: Tensor) -> Threshold:
    """From the cosine of every image to its nearest neighbour: a nearest neighbour is a near-duplicate if the logarithm
    of its distance, 1 - cosine, is less than the median by five times the distance from the median to the upper
    quartile. Ordinary images alone determine both, as long as duplicates are a minority: those are below the median.
    """
    distances = (1 - nearest.double()).clamp_min(CLOSEST).log()
    middle, upper = (float(value) for value in distances.quantile(torch.tensor([0.5, 0.75], dtype=torch.float64)))
    fence = min(max(np.exp(middle - SPREADS * (upper - middle)), CLOSEST), 2.0)
    rule = (
        f"the logarithm of the distance (1 - cosine) to the nearest neighbour is {SPREADS:g} times (upper quartile - "
        "median) below its median"
    )
    return Threshold(float(1 - fence), rule)


@torch.no_grad()
def groups(rows: Tensor, nearest: Tensor, threshold: float, device: torch.device) -> list[list[int]]:
    """Groups of rows, each with at least two, in the order of their first row. `rows` have length one; `nearest` is the
    cosine of each to its nearest neighbour: only rows that have one near enough are compared."""
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
