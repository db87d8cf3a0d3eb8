"""A sheet of test images: annotated objects (above) and detections (below)."""

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from tico_ssl.data.decoding import decode
from tico_ssl.evaluations._detection.outlines import coco_tools, run_lengths
from tico_ssl.evaluations._detection.pictures import Picture
from tico_ssl.evaluations._detection.scoring import Found
from tico_ssl.runtime.files import written_atomically

CELL, GAP, COLUMNS, VEIL = 256, 6, 6, 0.45
LEAST_SCORE, MOST_DRAWN = 0.3, 20


class Mark(NamedTuple):
    """A box to draw with its text, and the object's mask if known."""

    box: Sequence[float]
    label: int
    text: str
    pixels: np.ndarray | None


def save_sheet(path: Path, pictures: Sequence[Picture], found: Sequence[Found], classes: Sequence[str]) -> None:
    """A PNG with one column per picture: annotations above, detections below."""
    columns = max(1, min(COLUMNS, len(pictures)))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (CELL + GAP), rows * 2 * (CELL + GAP) + rows * GAP), "white")
    for number, (picture, one) in enumerate(zip(pictures, found)):
        left = number % columns * (CELL + GAP)
        top = number // columns * (2 * (CELL + GAP) + GAP)
        for marks in (true_marks(picture, classes), found_marks(one, classes)):
            drawn = draw(picture, marks)
            sheet.paste(drawn, (left + (CELL - drawn.width) // 2, top + (CELL - drawn.height) // 2))
            top += CELL + GAP
    with written_atomically(path) as temporary:
        sheet.save(temporary, "PNG")


def true_marks(picture: Picture, classes: Sequence[str]) -> list[Mark]:
    """The objects of a picture."""
    marks = []
    for one in picture.instances:
        code = None if one.outline is None else run_lengths(one.outline, picture.height, picture.width)
        marks.append(Mark(one.box, one.label, classes[one.label - 1], _decoded(code)))
    return marks


def found_marks(found: Found, classes: Sequence[str]) -> list[Mark]:
    """Confident detections, in ascending order of score, so that the best lies on top."""
    order = [place for place in np.argsort(-found.scores)[:MOST_DRAWN] if found.scores[place] >= LEAST_SCORE]
    return [
        Mark(
            found.boxes[place],
            int(found.labels[place]),
            f"{classes[found.labels[place] - 1]} {found.scores[place]:.2f}",
            None if found.masks is None else _decoded(found.masks[place]),
        )
        for place in reversed(order)
    ]


def draw(picture: Picture, marks: Sequence[Mark]) -> Image.Image:
    """A picture scaled to a cell, with boxes, class names and coloured masks."""
    pixels = decode(picture.file).permute(1, 2, 0).numpy().astype(np.float32)
    for mark in marks:
        if mark.pixels is not None:
            inside = mark.pixels.astype(bool)
            pixels[inside] = (1 - VEIL) * pixels[inside] + VEIL * np.array(colour(mark.label), dtype=np.float32)
    scale = CELL / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = Image.fromarray(pixels.round().astype(np.uint8)).resize(size, Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(image)
    for mark in marks:
        left, top, right, bottom = (float(value) * scale for value in mark.box)
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour(mark.label), width=2)
        written = pen.textbbox((left + 2, max(0.0, top - 11)), mark.text)
        pen.rectangle(written, fill=colour(mark.label))
        pen.text((left + 2, max(0.0, top - 11)), mark.text, fill="white")
    return image


def colour(label: int) -> tuple[int, int, int]:
    """A strong colour per class; neighbours differ much (golden-ratio steps around the colour wheel)."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.61803 % 1, 0.85, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)


def _decoded(code: Any) -> np.ndarray | None:
    return None if code is None else coco_tools().decode(code)
