"""Operations on boxes for a whole batch at a time.

The same results as torchvision's, which goes image by image, with a fraction of the kernel launches and without host
synchronisation, which otherwise dominate a step. Boxes are (..., 4): left, top, right, bottom.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import nms

MOST_STRETCH = math.log(1000 / 16)  # log of a side's factor, at most: beyond, exp may overflow
PAIRS_AT_ONCE = 2**26  # of boxes compared in one chunk
STEPS_UNWATCHED = 4  # iterations of suppression between convergence checks, which synchronise


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of all pairs from two lists of boxes, (..., M, 4) and (..., N, 4)."""
    a, b = first[..., :, None, :].unbind(-1), second[..., None, :, :].unbind(-1)
    width = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp_(min=0)
    height = (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp_(min=0)
    shared = width.mul_(height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def encode(truth: Tensor, boxes: Tensor, weights: tuple[float, float, float, float]) -> Tensor:
    """Regression targets of true boxes relative to given boxes: shifts of the centre, and logs of the side ratios."""
    size, true_size = boxes[..., 2:] - boxes[..., :2], truth[..., 2:] - truth[..., :2]
    shift = (truth[..., :2] + 0.5 * true_size) - (boxes[..., :2] + 0.5 * size)
    stretch = (true_size / size).log()
    x, y, wide, high = weights
    return torch.stack(
        [
            x * shift[..., 0] / size[..., 0],
            y * shift[..., 1] / size[..., 1],
            wide * stretch[..., 0],
            high * stretch[..., 1],
        ],
        dim=-1,
    )


def decode(codes: Tensor, boxes: Tensor) -> Tensor:
    """The boxes that predictions encode, with all weights 1."""
    size = boxes[..., 2:] - boxes[..., :2]
    centre = codes[..., :2] * size + (boxes[..., :2] + 0.5 * size)
    half = 0.5 * (codes[..., 2:].clamp(max=MOST_STRETCH).exp() * size)
    return torch.cat([centre - half, centre + half], dim=-1)


def survivors(boxes: Tensor, there: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in every row of boxes (N, K, 4), in descending order of score: a mask of those kept.

    Only boxes that are `there` count. Row by row would leave most of a GPU idle.
    """
    if boxes.is_cuda and (rows := PAIRS_AT_ONCE // max(1, boxes.shape[1]) ** 2):
        parts = zip(boxes.split(rows), there.split(rows), strict=True)
        return torch.cat([survivors_at_once(*part, threshold) for part in parts])
    kept = torch.zeros_like(there)
    order = -torch.arange(boxes.shape[1], dtype=torch.float32, device=boxes.device)
    for row, (mine, real) in enumerate(zip(boxes, there, strict=True)):
        places = real.nonzero().ravel()
        kept[row, places[nms(mine[places], order[places], threshold)]] = True
    return kept


def survivors_at_once(boxes: Tensor, there: Tensor, threshold: float) -> Tensor:
    """The same, all rows together.

    A box is kept if no kept box before it overlaps it too much. Iterated from "all kept", at least one more box is
    final after each iteration, and the mask stops changing when all are.
    """
    beats = (overlaps(boxes, boxes) > threshold).triu(1)
    kept = there
    while True:
        for _ in range(STEPS_UNWATCHED):
            before, kept = kept, there & ~(kept[:, :, None] & beats).any(1)
        if torch.equal(before, kept):
            return kept


class Drawn(NamedTuple):
    """Indices drawn in every row, objects (N, P) and background (N, Q), and which of them are valid."""

    positive: Tensor
    is_positive: Tensor
    negative: Tensor
    is_negative: Tensor


def draw(labels: Tensor, count: int, most_positive: int) -> Drawn:
    """`count` random indices in every row of labels (N, K): objects (above 0), at most `most_positive`, then background
    (0). A label below 0 is never drawn."""
    lots = torch.rand(labels.shape, device=labels.device)
    won, positive = lots.where(labels > 0, -1.0).topk(min(most_positive, labels.shape[1]))
    lost, negative = lots.where(labels == 0, -1.0).topk(min(count, labels.shape[1]))
    is_positive = won >= 0
    room = count - is_positive.sum(1, keepdim=True)
    is_negative = (lost >= 0) & (torch.arange(lost.shape[1], device=labels.device) < room)
    return Drawn(positive, is_positive, negative, is_negative)


def at(values: Tensor, places: Tensor) -> Tensor:
    """values[n, places[n, i]] for every row n: (N, K, ...) and (N, P) give (N, P, ...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], places]
