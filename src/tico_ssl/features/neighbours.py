"""Exact nearest neighbours by cosine similarity, in chunks instead of the full similarity matrix."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.runtime.progress import track

BANK_CHUNK, QUERY_CHUNK = 16_384, 1_024  # rows; their similarities take 64 MiB


class Neighbours(NamedTuple):
    """Cosines of each query's nearest neighbours, in descending order, and their indices in the bank: (queries, k)."""

    cosines: Tensor
    places: Tensor


@torch.no_grad()
def nearest(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    left_out: Tensor | None = None,
    device: torch.device | None = None,
    label: str | None = None,
    bank_chunk: int = BANK_CHUNK,
    query_chunk: int = QUERY_CHUNK,
) -> Neighbours:
    """The k nearest neighbours of each query in a bank. `left_out`: one index per query that is excluded.

    The bank is read once, in chunks, so it may be larger than the device's memory: only a chunk, the queries and the
    best neighbours so far are held. Only chunks are copied and normalised.
    """
    device = device or bank.device
    k = min(k, len(bank) - (left_out is not None))
    parts = [F.normalize(part.to(device), dim=1) for part in queries.split(query_chunk)]
    skipped = [None] * len(parts) if left_out is None else list(left_out.to(device).split(query_chunk))
    best: list[Neighbours | None] = [None] * len(parts)
    starts = range(0, len(bank), bank_chunk)
    for start in track(starts, len(starts), label):
        piece = F.normalize(bank[start : start + bank_chunk].to(device), dim=1).T
        for number, (part, skip) in enumerate(zip(parts, skipped)):
            cosines = part @ piece
            if skip is not None:
                _leave_out(cosines, skip - start)
            found = cosines.topk(min(k, cosines.shape[1]), dim=1)
            best[number] = _merged(best[number], Neighbours(found.values, found.indices + start), k)
    done = [part for part in best if part is not None]
    return Neighbours(torch.cat([part.cosines for part in done]), torch.cat([part.places for part in done]))


def _leave_out(cosines: Tensor, columns: Tensor) -> None:
    inside = (columns >= 0) & (columns < cosines.shape[1])
    rows = inside.nonzero().ravel()
    cosines[rows, columns[rows]] = -torch.inf


def _merged(before: Neighbours | None, found: Neighbours, k: int) -> Neighbours:
    if before is None:
        return found
    cosines = torch.cat([before.cosines, found.cosines], dim=1)
    places = torch.cat([before.places, found.places], dim=1)
    kept = cosines.topk(min(k, cosines.shape[1]), dim=1)
    return Neighbours(kept.values, places.gather(1, kept.indices))
