"""Where a view is cut from: the box of a crop, the pieces of a jigsaw."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.config.views import ViewPolicy

PIECE = 64 / 85  # fraction of a jigsaw cell's side, so that edges do not reveal which pieces are neighbours


def box_ranges(policies: Sequence[ViewPolicy]) -> Tensor:
    """Ranges for `boxes`, (4, policies): lower bound and span of the area and of the logarithm of the aspect ratio."""
    rows = []
    for policy in policies:
        (low, high), (narrow, wide) = policy.crop_scale, (math.log(ratio) for ratio in policy.crop_ratio)
        rows.append((low, high - low, narrow, wide - narrow))
    return torch.tensor(rows).T.contiguous()


def boxes(uniforms: Tensor, sizes: Tensor, ranges: Tensor) -> Tensor:
    """BYOL's crop: one draw of area and aspect ratio, clipped to the image, at a uniformly random position.

    Uniforms are (..., policies, 4), sizes (..., 2), broadcast against them, and ranges (4, policies). The result is
    (..., policies, 4): top, left, height, width.
    """
    heights, widths = sizes.to(uniforms).unbind(dim=-1)
    low, span, log_low, log_span = ranges.to(uniforms).unbind()
    u_area, u_ratio, u_top, u_left = uniforms.unbind(dim=-1)
    area = (low + u_area * span) * heights * widths
    ratio = torch.exp(log_low + u_ratio * log_span)
    height = torch.minimum((area / ratio).sqrt_().round_().clamp_min_(1), heights)
    width = torch.minimum((area * ratio).sqrt_().round_().clamp_min_(1), widths)
    top, left = (u_top * (heights - height + 1)).floor_(), (u_left * (widths - width + 1)).floor_()
    return torch.stack([top, left, height, width], dim=-1)


def cut_jigsaw(images: Tensor, u: Tensor, grid: int) -> Tensor:
    """Square images (N, C, S, S) and uniforms (N, grid**2, 3) to pieces (N, grid**2, C, P, P) in random order.

    As Noroozi and Favaro cut their puzzles: one piece from each cell of the grid, 64 of its 85 pixels wide and high if
    S is 255, at a uniformly random position within the cell.
    """
    cell = images.shape[-1] // grid
    side = piece_side(cell)
    position, rank = torch.split(u, [2, 1], dim=-1)
    order = rank.squeeze(-1).argsort(dim=1, stable=True)
    down, right = torch.floor(position * (cell - side + 1)).long().unbind(dim=-1)
    top, left = order // grid * cell + down, order % grid * cell + right
    along = torch.arange(side, device=images.device)
    rows, columns = top[..., None, None] + along[:, None], left[..., None, None] + along
    number = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    return images.permute(0, 2, 3, 1)[number, rows, columns].permute(0, 1, 4, 2, 3).contiguous()


def piece_side(cell: int) -> int:
    """Side of a jigsaw piece, given the side of its cell in pixels."""
    return max(1, round(cell * PIECE))
