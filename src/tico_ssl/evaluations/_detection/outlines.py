"""Conversion of outlines to masks and back: polygons, COCO's run-length encoding, and a network's small masks."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command

PASTE_THRESHOLD = 0.5  # probability above which a pixel belongs to the object
MOST_LENGTH = 1 << 20  # pixels that the polygons of an object may pass through, which take 50 MB to draw
AROUND = 1  # times the longer side that a corner may lie outside the image


def coco_tools() -> Any:
    """pycocotools.mask, or a UserError that says what to install."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise UserError(f"detection needs pycocotools: {install_command('detection')}") from error
    return mask


def require_outline(outline: Any, height: int, width: int) -> None:
    """Refuse, by a ValueError, an outline that pycocotools could not draw in an image of this size, or only in memory
    out of proportion: its code in C checks nothing."""
    if isinstance(outline, list):
        _require_polygons(outline, max(height, width))
    elif outline is not None:
        _require_runs(outline, height, width)


def _require_polygons(rings: list[list[Any]], side: int) -> None:
    low, high = -AROUND * side, (1 + AROUND) * side
    for ring in rings:
        if not ({*map(type, ring)} <= {int, float} and all(map(math.isfinite, ring))):
            raise ValueError("has corners that are no numbers")
        if min(ring) < low or max(ring) > high:
            raise ValueError("has corners far outside the image")
    _require_length(rings, (high - low) * sum(map(len, rings)))


def _require_length(rings: list[list[float]], most: float = math.inf) -> None:
    """Refuse polygons that pass through too many pixels; they are measured if there may be so many (`most`)."""
    if most > MOST_LENGTH:
        corners = [np.reshape(ring, (-1, 2)) for ring in rings]
        edges = [np.abs(ring - np.roll(ring, 1, axis=0)).max(1) + 1 for ring in corners]
        if (length := sum(edge.sum() for edge in edges)) > MOST_LENGTH:
            raise ValueError(f"is {length:,.0f} pixels long; at most {MOST_LENGTH:,} are drawn")


def _require_runs(outline: dict[str, Any], height: int, width: int) -> None:
    size, counts = outline["size"], outline["counts"]
    if size != [height, width]:
        raise ValueError(f"has the size {str(size)[:80]}, its image {[height, width]}")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or {*map(type, runs)} - {int} or any(run < 0 for run in runs):
        raise ValueError("has runs that are no numbers of pixels")
    if sum(runs) != height * width:
        raise ValueError(f"has runs of {sum(runs):,} pixels, its image has {height * width:,}")


def _runs(text: str) -> list[int] | None:
    """The runs that COCO writes as text: from the third on, less the one before the last, in groups of five bits with
    the lowest first, of which each but the last is marked. None if it is something else."""
    codes = np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) - 48
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        return None
    ends = np.flatnonzero(codes & 32 == 0)
    begins = np.append(0, ends[:-1] + 1)
    if (ends - begins).max() > 6:  # groups, of 32 bits
        return None
    places = np.arange(len(codes)) - np.repeat(begins, ends - begins + 1)
    values = np.add.reduceat((codes & 31) << 5 * places, begins)
    values -= np.where(codes[ends] & 16, 1 << 5 * (ends - begins + 1), 0)
    for first in (1, 2):  # the first run stands alone
        values[first::2] = values[first::2].cumsum()
    found: list[int] = values.tolist()
    return found


def run_lengths(outline: Any, height: int, width: int) -> Any:
    """The run-length encoding of an outline in an image of a given size."""
    tools = coco_tools()
    if isinstance(outline, list):
        _require_length(outline)  # at this size
        return tools.merge(tools.frPyObjects(outline, height, width))
    return tools.frPyObjects(outline, height, width) if isinstance(outline["counts"], list) else outline


def pixels(outline: Any, original: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The object's mask (height, width), 0 or 1, in the resized image.

    Polygons are scaled before rasterisation; encoded masks are decoded and resized by nearest neighbour.
    """
    tools = coco_tools()
    if isinstance(outline, list):
        scale = np.array([size[1] / original[1], size[0] / original[0]])
        rings = [(np.reshape(ring, (-1, 2)) * scale).ravel().tolist() for ring in outline]
        return torch.from_numpy(tools.decode(run_lengths(rings, *size)))
    mask = torch.from_numpy(tools.decode(run_lengths(outline, *original)))
    return F.interpolate(mask[None, None], size=size, mode="nearest")[0, 0]


def box_outline(box: tuple[float, float, float, float]) -> list[list[float]]:
    """A box as a polygon."""
    left, top, right, bottom = box
    return [[left, top, right, top, right, bottom, left, bottom]]


def pasted(mask: Tensor, box: Tensor, height: int, width: int) -> np.ndarray:
    """A network's square mask (side, side) of probabilities, resized to its box in an image: uint8 0 or 1.

    Every pixel takes the bilinear value at its centre; nothing outside the box is set.
    """
    full = np.zeros((height, width), dtype=np.uint8)
    left, top, right, bottom = box.tolist()
    x0, y0 = max(int(left), 0), max(int(top), 0)
    x1, y1 = min(int(np.ceil(right)), width), min(int(np.ceil(bottom)), height)
    if x1 <= x0 or y1 <= y0:
        return full
    x = (torch.arange(x0, x1) + 0.5 - left) / max(right - left, 1e-6) * 2 - 1
    y = (torch.arange(y0, y1) + 0.5 - top) / max(bottom - top, 1e-6) * 2 - 1
    grid = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), dim=-1)[None]
    values = F.grid_sample(mask[None, None].float(), grid.float(), align_corners=False)[0, 0]
    full[y0:y1, x0:x1] = (values >= PASTE_THRESHOLD).numpy()
    return full


def encoded(masks: list[np.ndarray]) -> list[dict[str, Any]]:
    """Run-length encodings of masks."""
    return [coco_tools().encode(np.asfortranarray(mask)) for mask in masks]
