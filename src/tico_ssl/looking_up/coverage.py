"""A subset that covers a set: k-centre greedy (Gonzalez, 1985), without chance.

It begins with the medoid. Each next image is the one whose nearest chosen image is furthest away. No subset of the same
size has less than half of the resulting radius (in Euclidean distance, which has the same order on unit vectors).
"""

import torch
from torch import Tensor

from tico_ssl.runtime.progress import track

PIECE = 16_384  # rows that are compared at once


@torch.no_grad()
def medoid(rows: Tensor) -> int:
    """The unit row with the largest mean cosine to all, which is its product with the mean of all."""
    parts = rows.split(PIECE)
    total = torch.stack([part.double().sum(dim=0) for part in parts]).sum(dim=0)
    cosines = torch.cat([part.double() @ total for part in parts])
    return _first_largest(cosines)


@torch.no_grad()
def k_centre(rows: Tensor, count: int, device: torch.device) -> tuple[list[int], list[float]]:
    """So many unit rows in the order in which they are chosen, and how far each was from those before it (1 - cosine).
    Of several that are equally far, the first is chosen."""
    pieces = [part.to(device) for part in rows.split(PIECE)]
    chosen, far = [medoid(rows)], [0.0]
    distances = torch.full((len(rows),), torch.inf, device=device)
    for _ in track(range(count - 1), count - 1, "subset"):
        centre = rows[chosen[-1]].to(device)
        distances = torch.minimum(distances, torch.cat([1 - part @ centre for part in pieces]))
        distances[chosen[-1]] = -torch.inf
        chosen.append(_first_largest(distances))
        far.append(max(0.0, float(distances[chosen[-1]])))
    return chosen, far


def _first_largest(values: Tensor) -> int:
    return int((values == values.max()).nonzero()[0])
