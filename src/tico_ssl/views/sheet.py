"""A contact sheet: originals and what the network saw of them, for a person to look at."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from tico_ssl.views.centre import centre_crop
from tico_ssl.views.executor import Views

COLUMNS, CELL = 12, 96


def save_contact_sheet(path: Path, images: Tensor | Sequence[Tensor], made: Sequence[Tensor], views: Views) -> None:
    """A PNG with one column per image: the original on top, its views below."""
    count = min(COLUMNS, len(images))
    rows = [centre_crop(images[:count], CELL).cpu()]
    for view in made:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (views.mean, views.std))
        pixels = (view[:count].float().cpu() * std + mean).clamp(0, 1)
        rows.append(torch.nn.functional.interpolate(pixels, size=(CELL, CELL), mode="nearest"))
    grid = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    channels = grid[:3] if len(grid) >= 3 else grid[:1].expand(3, -1, -1)
    Image.fromarray((channels * 255).round().byte().permute(1, 2, 0).contiguous().numpy()).save(path)
