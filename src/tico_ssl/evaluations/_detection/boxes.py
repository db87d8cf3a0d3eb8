"""Arithmetic of boxes for a whole batch at a time.

What torchvision does image by image, with the same results, in a fraction of the launches and without waiting for the
device, which is what a GPU spends most of a step on otherwise. Boxes are (..., 4): left, top, right, bottom.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import nms

MOST_STRETCH = math.log(1000 / 16)  # of a side, as a logarithm: beyond it an exponential may overflow
PAIRS_AT_ONCE = 2**26  # of boxes that are compared in one piece
STEPS_UNWATCHED = 4  # of suppression between two questions whether it is finished


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of every box of one list (..., M, 4) with every one of another (..., N, 4)."""
    a, b = first[..., :, None, :].unbind(-1), second[..., None, :, :].unbind(-1)
    width = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp_(min=0)
    height = (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp_(min=0)
    shared = width.mul_(height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def encode(truth: Tensor, boxes: Tensor, weights: tuple[float, float, float, float]) -> Tensor:
    """What would have to be predicted at boxes to get true ones: shifts of the centre, and logarithms of the sides."""
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
    """The boxes that predictions stand for, with all weights 1."""
    size = boxes[..., 2:] - boxes[..., :2]
    centre = codes[..., :2] * size + (boxes[..., :2] + 0.5 * size)
    half = 0.5 * (codes[..., 2:].clamp(max=MOST_STRETCH).exp() * size)
    return torch.cat([centre - half, centre + half], dim=-1)


def survivors(boxes: Tensor, there: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in every row of boxes (N, K, 4), which come by falling score: a mask of those kept.

    Only boxes that are `there` count. On a GPU one row after the other would leave most of it idle.
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

    A box is kept if no kept box before it overlaps it too much. Asked of all boxes again and again, beginning with all
    as kept, the answer is right for one more box each time at least, and no longer changes when it is right for all.
    """
    beats = (overlaps(boxes, boxes) > threshold).triu(1)
    kept = there
    while True:
        for _ in range(STEPS_UNWATCHED):
            before, kept = kept, there & ~(kept[:, :, None] & beats).any(1)
        if torch.equal(before, kept):
            return kept


class Drawn(NamedTuple):
    """Places drawn in every row, objects (N, P) and background (N, Q), and which of them there really are."""

    positive: Tensor
    is_positive: Tensor
    negative: Tensor
    is_negative: Tensor


def draw(labels: Tensor, count: int, most_positive: int) -> Drawn:
    """So many places in every row of labels (N, K), at random: objects (above 0) as far as there are, and allowed, and
    background (0) for the rest. A label below 0 is never drawn."""
    lots = torch.rand(labels.shape, device=labels.device)
    won, positive = lots.where(labels > 0, -1.0).topk(min(most_positive, labels.shape[1]))
    lost, negative = lots.where(labels == 0, -1.0).topk(min(count, labels.shape[1]))
    is_positive = won >= 0
    room = count - is_positive.sum(1, keepdim=True)
    is_negative = (lost >= 0) & (torch.arange(lost.shape[1], device=labels.device) < room)
    return Drawn(positive, is_positive, negative, is_negative)


def at(values: Tensor, places: Tensor) -> Tensor:
    """values[n, places[n, i]] for every row n, whatever comes behind: (N, K, ...) and (N, P) give (N, P, ...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], places]
