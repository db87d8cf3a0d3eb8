"""Conversion of outlines to masks and back: polygons, COCO's run-length encoding, and a network's small masks."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command

PASTE_THRESHOLD = 0.5  # probability above which a pixel belongs to the object


def coco_tools() -> Any:
    """pycocotools.mask, or a UserError that says what to install."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise UserError(f"detection needs pycocotools: {install_command('detection')}") from error
    return mask


def run_lengths(outline: Any, height: int, width: int) -> Any:
    """The run-length encoding of an outline in an image of a given size."""
    tools = coco_tools()
    if isinstance(outline, list):
        return tools.merge(tools.frPyObjects(outline, height, width))
    if list(outline["size"]) != [height, width]:
        raise UserError(f"a run-length encoding has {outline['size']} pixels, its image has {[height, width]}")
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
