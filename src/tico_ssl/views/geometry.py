"""Where a view is cut from: the box of a crop, the pieces of a jigsaw."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tico_ssl.config.views import CropSampling, ViewPolicy
from tico_ssl.views.table import TRIES

PIECE = 64 / 85  # fraction of a jigsaw cell's side, so that edges do not reveal which pieces are neighbours
COVERED = 0.1  # least share of the image in a distorted crop, whatever crop_scale says: SimCLR's min_object_covered


class Boxes:
    """The boxes of the crops of several policies, each by its own sampling."""

    def __init__(self, policies: Sequence[ViewPolicy]) -> None:
        by_sampling: dict[CropSampling, list[int]] = {}
        for number, policy in enumerate(policies):
            by_sampling.setdefault(policy.crop_sampling, []).append(number)
        self.retried = any(name != "clipped" for name in by_sampling)
        self._groups = [
            (SAMPLINGS[name], numbers, _ranges([policies[number] for number in numbers]))
            for name, numbers in by_sampling.items()
        ]

    def __call__(self, uniforms: Tensor, retries: Tensor, sizes: Tensor) -> Tensor:
        """Top, left, height and width (..., policies, 4).

        Uniforms are (..., policies, 4), retries (..., policies, 2 * (TRIES - 1)) if any crop is `retried`, and sizes of
        images (..., 2), broadcast against them.
        """
        heights, widths = sizes.to(uniforms).unbind(dim=-1)
        boxes = torch.empty_like(uniforms)
        for sampling, numbers, ranges in self._groups:
            there = Ranges(*(values.to(uniforms) for values in ranges))
            drawn = sampling(uniforms[..., numbers, :], retries[..., numbers, :], heights, widths, there)
            boxes[..., numbers, :] = torch.stack(drawn, dim=-1)
        return boxes


class Ranges(NamedTuple):
    """Bounds of the crops of some policies, (policies,) each."""

    smallest: Tensor
    largest: Tensor
    area_span: Tensor
    narrowest: Tensor
    widest: Tensor
    log_narrowest: Tensor
    log_span: Tensor

    def per_try(self) -> "Ranges":
        """Bounds to broadcast against tries, (policies, 1) each."""
        return Ranges(*(values.unsqueeze(-1) for values in self))


def _ranges(policies: Sequence[ViewPolicy]) -> Ranges:
    rows = []
    for policy in policies:
        (low, high), (narrow, wide) = policy.crop_scale, policy.crop_ratio
        log_narrow, log_wide = math.log(narrow), math.log(wide)
        rows.append((low, high, high - low, narrow, wide, log_narrow, log_wide - log_narrow))
    return Ranges(*torch.tensor(rows).T.contiguous())


def _clipped(uniforms: Tensor, _: Tensor, heights: Tensor, widths: Tensor, ranges: Ranges) -> tuple[Tensor, ...]:
    """BYOL's crop: one draw of area and aspect ratio, clipped to the image, at a uniformly random position."""
    u_area, u_ratio, u_top, u_left = uniforms.unbind(dim=-1)
    height, width = _sides(u_area, u_ratio, heights, widths, ranges)
    height, width = torch.minimum(height.clamp_min_(1), heights), torch.minimum(width.clamp_min_(1), widths)
    return _placed(u_top, heights - height + 1), _placed(u_left, widths - width + 1), height, width


def _rejection(
    uniforms: Tensor, retries: Tensor, heights: Tensor, widths: Tensor, ranges: Ranges
) -> tuple[Tensor, ...]:
    """torchvision's crop: the first of ten draws that fits into the image, else the largest central box whose aspect
    ratio is in the range."""
    u_area, u_ratio, u_top, u_left = _tries(uniforms, retries)
    rows, columns = heights.unsqueeze(-1), widths.unsqueeze(-1)
    height, width = _sides(u_area, u_ratio, rows, columns, ranges.per_try())
    fits = (height >= 1) & (height <= rows) & (width >= 1) & (width <= columns)
    central_height = torch.minimum((widths / ranges.narrowest).round_(), heights)
    central_width = torch.minimum((heights * ranges.widest).round_(), widths)
    found, height, width = _first(fits, height, width, central_height, central_width)
    top = torch.where(found, _placed(u_top, heights - height + 1), ((heights - height) / 2).floor_())
    left = torch.where(found, _placed(u_left, widths - width + 1), ((widths - width) / 2).floor_())
    return top, left, height, width


def _distorted(
    uniforms: Tensor, retries: Tensor, heights: Tensor, widths: Tensor, ranges: Ranges
) -> tuple[Tensor, ...]:
    """SimCLR's crop, TensorFlow's sample_distorted_bounding_box: a uniform aspect ratio, and a height uniform between
    the least and the largest that this ratio allows; the whole image if none of the tries fits.

    The last row and column are never reached, as there. SimCLR has a hundred tries, which differs from ten only for
    images longer than about seven to one.
    """
    u_height, u_ratio, u_top, u_left = _tries(uniforms, retries)
    rows, columns, bounds = heights.unsqueeze(-1), widths.unsqueeze(-1), ranges.per_try()
    least, most = bounds.smallest * rows * columns, bounds.largest * rows * columns
    ratio = torch.lerp(bounds.narrowest, bounds.widest, u_ratio)
    widest_fit = ((columns + 0.5) / ratio).floor_()
    widest_fit = widest_fit - ((widest_fit * ratio).round_() > columns).to(ratio)
    tallest = torch.minimum(torch.minimum((most / ratio).sqrt_().round_(), rows), widest_fit)
    shortest = torch.minimum((least / ratio).sqrt_().round_(), tallest)
    height = shortest + _placed(u_height, tallest - shortest + 1)
    # Rounding may have left the range of areas by less than a row.
    height = height + (height * (height * ratio).round_() < least).to(ratio)
    height = height - (height * (height * ratio).round_() > most).to(ratio)
    width = (height * ratio).round_()
    area = height * width
    fits = (height <= rows) & (width <= columns) & (area >= least) & (area >= COVERED * rows * columns) & (area <= most)
    _, height, width = _first(fits, height, width, heights, widths)
    return _placed(u_top, heights - height), _placed(u_left, widths - width), height, width


SAMPLINGS: dict[CropSampling, Callable[[Tensor, Tensor, Tensor, Tensor, Ranges], tuple[Tensor, ...]]] = {
    "clipped": _clipped,
    "rejection": _rejection,
    "distorted": _distorted,
}


def _sides(u_area: Tensor, u_ratio: Tensor, heights: Tensor, widths: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Height and width in whole pixels of a box with uniform area and log-uniform aspect ratio."""
    area = (ranges.smallest + u_area * ranges.area_span) * heights * widths
    ratio = torch.exp(ranges.log_narrowest + u_ratio * ranges.log_span)
    return (area / ratio).sqrt_().round_(), (area * ratio).sqrt_().round_()


def _placed(u: Tensor, places: Tensor) -> Tensor:
    """One of so many places, each as likely."""
    return (u * places).floor_()


def _tries(uniforms: Tensor, retries: Tensor) -> tuple[Tensor, ...]:
    """Numbers of the two sides, (..., TRIES) each, and of the position, which all tries share."""
    sides, position = uniforms.tensor_split(2, dim=-1)
    tries = torch.cat([sides, retries], dim=-1).unflatten(-1, (TRIES, 2))
    return *tries.unbind(dim=-1), *position.unbind(dim=-1)


def _first(
    fits: Tensor, height: Tensor, width: Tensor, otherwise_height: Tensor, otherwise_width: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether any of the tries (..., TRIES) fits; height and width of the first that does, or the others."""
    found, number = fits.to(torch.uint8).max(dim=-1, keepdim=True)
    found = found.squeeze(-1) > 0
    height, width = (sides.gather(-1, number).squeeze(-1) for sides in (height, width))
    return found, torch.where(found, height, otherwise_height), torch.where(found, width, otherwise_width)


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
