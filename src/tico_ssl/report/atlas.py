"""Sprite sheets: thousands of thumbnails in a few images, cut up again in the browser."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

COLUMNS = 32
PER_SHEET = COLUMNS * COLUMNS
BUDGET = 17 << 18  # bytes of all sheets, 4.25 MiB; base64 adds a third, and the page has to stay below 10 MiB
QUALITIES = (80, 65, 50, 40, 30, 20)


@dataclass(frozen=True)
class Atlas:
    """Sheets as data URLs. Image i is on sheet i // per_sheet, row by row, each a square of `side` pixels."""

    side: int
    count: int
    sheets: list[str]
    columns: int = COLUMNS
    per_sheet: int = PER_SHEET


def build_atlas(thumbnails: np.ndarray, budget: int = BUDGET) -> Atlas:
    """Sheets of thumbnails (n, side, side, 3) at the highest quality that fits the budget, by the size of the first
    sheet; halved in size if not even the lowest quality fits."""
    count, side = thumbnails.shape[:2]
    parts = [thumbnails[start : start + PER_SHEET] for start in range(0, count, PER_SHEET)]
    for quality in QUALITIES:
        if count and len(_webp(_sheet(parts[0]), quality)) * count / len(parts[0]) <= budget:
            return Atlas(side, count, [data_url(_webp(_sheet(part), quality)) for part in parts])
    return Atlas(side, count, []) if not count else build_atlas(_halved(thumbnails), budget if side > 8 else 1 << 40)


def image_url(pixels: np.ndarray, quality: int = 75) -> str:
    """One image (height, width, 3) as a data URL."""
    return data_url(_webp(Image.fromarray(pixels), quality))


def data_url(content: bytes, kind: str = "image/webp") -> str:
    """Bytes as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _halved(thumbnails: np.ndarray) -> np.ndarray:
    """Downsampled by two, averaging."""
    count, side = thumbnails.shape[0], thumbnails.shape[1] // 2
    cut = thumbnails[:, : 2 * side, : 2 * side].reshape(count, side, 2, side, 2, 3)
    halved: np.ndarray = cut.mean(axis=(2, 4), dtype=np.float32).round().astype(np.uint8)
    return halved


def _sheet(part: Sequence[np.ndarray] | np.ndarray) -> Image.Image:
    side = part[0].shape[0]
    rows = -(-len(part) // COLUMNS)
    sheet = np.full((rows * side, COLUMNS * side, 3), 255, dtype=np.uint8)
    for place, pixels in enumerate(part):
        top, left = place // COLUMNS * side, place % COLUMNS * side
        sheet[top : top + side, left : left + side] = pixels
    return Image.fromarray(sheet)


def _webp(image: Image.Image, quality: int) -> bytes:
    content = io.BytesIO()
    image.save(content, "WEBP", quality=quality, method=2)
    return content.getvalue()
