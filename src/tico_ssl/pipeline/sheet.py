"""A contact sheet: original images and their views."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from tico_ssl.data.bad_files import BadFiles, readable
from tico_ssl.data.source import Source
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.randomness import generator
from tico_ssl.views.executor import Views

COLUMNS, CELL, GAP, PIECE_GAP = 12, 128, 4, 2
PAPER = 1.0  # white background


def preview(source: Source, recipe_views: Views, path: Path, count: int = COLUMNS, seed: int = 0) -> BadFiles:
    """Save a sheet of images of a source, evenly spaced so that all classes appear, and of their views.

    Returns the unreadable files; the images after them are shown instead.
    """
    bad, columns = BadFiles(), min(count, len(source))
    images = [readable(source, column * len(source) // columns, bad) for column in range(columns)]
    made = recipe_views(images, recipe_views.draw(len(images), generator(seed, "views", 0)))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_contact_sheet(path, images, made, recipe_views, count)
    return bad


def save_contact_sheet(
    path: Path, images: Tensor | Sequence[Tensor], made: Sequence[Tensor], views: Views, count: int = COLUMNS
) -> None:
    """A PNG with one column per image: the whole original on top, its views below.

    Views keep their relative sizes, so local crops are small; the pieces of a jigsaw are side by side. Of images with
    more than three channels the first three are shown as red, green and blue, of two the first as grey.
    """
    count = min(count, len(images))
    largest = max(view.shape[-1] for view in made)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (views.mean, views.std))
    rows = [[_fitted(_unit(image)) for image in images[:count]]]
    for view in made:
        pixels = view[:count].float().cpu() * std + mean
        rows.append([_mosaic(x) if x.ndim == 4 else _shrunk(x, x.shape[-1] / largest) for x in pixels])
    sheet = _rgb(_stacked([_tiled(row, count) for row in rows]))
    drawn = (sheet.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    with written_atomically(path) as temporary:
        Image.fromarray(drawn).save(temporary, Image.registered_extensions().get(path.suffix.lower(), "PNG"))


def _fitted(image: Tensor) -> Tensor:
    """The whole image, centred in a cell."""
    height, width = (max(1, round(CELL * side / max(image.shape[-2:]))) for side in image.shape[-2:])
    return _centred(_resized(image[None], height, width)[0], CELL)


def _shrunk(view: Tensor, share: float) -> Tensor:
    """A square view, centred in a cell of its own height, scaled relative to the largest view."""
    side = max(1, round(CELL * share))
    return _centred(_resized(view[None], side, side)[0], side)


def _mosaic(pieces: Tensor) -> Tensor:
    """The pieces (grid**2, C, side, side) of a jigsaw as one cell, in the order in which the network gets them."""
    grid = round(len(pieces) ** 0.5)
    side = (CELL - (grid - 1) * PIECE_GAP) // grid
    return _centred(_tiled(_resized(pieces, side, side), grid, PIECE_GAP), CELL)


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    """Nearest neighbour for strong enlargement, so that pixels stay visible; bilinear otherwise."""
    if height >= 2 * images.shape[-2]:
        return interpolate(images, size=(height, width), mode="nearest")
    return interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def _centred(image: Tensor, height: int) -> Tensor:
    """The image centred on a background of this height and a cell's width."""
    cell = _paper(image, height, CELL)
    top, left = (height - image.shape[-2]) // 2, (CELL - image.shape[-1]) // 2
    cell[:, top : top + image.shape[-2], left : left + image.shape[-1]] = image
    return cell


def _tiled(cells: Sequence[Tensor] | Tensor, columns: int, gap: int = GAP) -> Tensor:
    """Cells of one size, row by row, with gaps."""
    height, width = cells[0].shape[-2:]
    rows = len(cells) // columns
    grid = _paper(cells[0], rows * (height + gap) - gap, columns * (width + gap) - gap)
    for number, cell in enumerate(cells):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        grid[:, top : top + height, left : left + width] = cell
    return grid


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows of one width below each other, with a larger gap after the first."""
    gaps = [_paper(rows[0], GAP if number else 2 * GAP, rows[0].shape[-1]) for number in range(len(rows) - 1)]
    pairs = [strip for row, gap in zip(rows[:-1], gaps, strict=True) for strip in (row, gap)]
    return torch.cat([*pairs, rows[-1]], dim=1)


def _paper(like: Tensor, height: int, width: int) -> Tensor:
    return like.new_full((len(like), height, width), PAPER)


def _unit(image: Tensor) -> Tensor:
    image = image.cpu()
    return image.float() if image.is_floating_point() else image / 255


def _rgb(cell: Tensor) -> Tensor:
    return cell[:3] if len(cell) >= 3 else cell[:1].expand(3, -1, -1)
