"""Ten synthetic patterns, generated from a seed; needs no files.

The class is the pattern and nothing else. Orientation, frequency, offset, colours, share of foreground, shading and
noise are drawn from the same distributions for every class, so neither colour statistics nor raw pixels give the
label away, and a representation has to pick up the local structure to do well.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from tico_ssl.config.sections import DataConfig
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import Reading
from tico_ssl.data.source import Source, Split

RANK = -1  # a name takes precedence over a folder of the same name
NAMES = ("textures",)
COUNTS: dict[Split, int] = {"train": 10_000, "test": 2_000}

Pattern = Callable[[Tensor, Tensor], Tensor]

_CHUNK = 100  # images drawn at a time: bounds the memory, and must stay a multiple of the number of classes
_PERIODS = (3.2, 5.0)  # per image side: a crop of 30 % of the area still shows almost two periods
_FOREGROUND = (0.42, 0.58)  # share of the image that the foreground colour covers
_LUMINANCE = torch.tensor([0.299, 0.587, 0.114])


def matches(place: str) -> bool:
    """The name."""
    return place in NAMES


def open(place: str, split: Split, reading: Reading, config: DataConfig) -> Source | None:
    """Images of the network's input size; for training, `data.limit` of them."""
    count = config.limit if split == "train" and config.limit else COUNTS[split]
    images, labels = draw_textures(count, config.image_size, seed=0 if split == "train" else 1)
    return from_arrays(place, images, labels, CLASSES)


# Each pattern maps coordinates, in periods, to a field that grows by about one per period away from the figure. Only
# the level sets matter: the share of foreground is set later, by the level at which the field is cut.


def _fold(x: Tensor) -> Tensor:
    """Distance to the nearest integer: a triangle wave between 0 and 0.5."""
    return (x - x.round()).abs_()


def _parity(*cells: Tensor) -> Tensor:
    """+1 where the cell indices add up to an even number, -1 where odd."""
    return 1 - 2 * torch.remainder(sum(cells[1:], cells[0]), 2)


def _stripes(u: Tensor, v: Tensor) -> Tensor:
    """Straight parallel bars."""
    return _fold(u)


def _checks(u: Tensor, v: Tensor) -> Tensor:
    """A chequerboard; its squares are smaller than a period, to match the scale of the other patterns."""
    u, v = 1.7 * u, 1.7 * v
    return _parity(u.floor(), v.floor()) * torch.minimum(_fold(u), _fold(v)) / 1.7


def _dots(u: Tensor, v: Tensor) -> Tensor:
    """Discs on a hexagonal grid, written as two interleaved rectangular ones."""
    root = math.sqrt(3)
    even = torch.hypot(_fold(u), root * _fold(v / root))
    odd = torch.hypot(_fold(u + 0.5), root * _fold(v / root + 0.5))
    return torch.minimum(even, odd)


def _lattice(u: Tensor, v: Tensor) -> Tensor:
    """Two families of lines that cross at right angles."""
    return torch.minimum(_fold(u), _fold(v))


def _zigzag(u: Tensor, v: Tensor) -> Tensor:
    """Stripes that turn by a right angle again and again."""
    return _fold(u + 2 * _fold(v / 2)) / math.sqrt(2)


def _rings(u: Tensor, v: Tensor) -> Tensor:
    """Targets: concentric rings around the points of a square grid."""
    return _fold(torch.hypot(2 * _fold(u / 2), 2 * _fold(v / 2)))


def _bricks(u: Tensor, v: Tensor) -> Tensor:
    """A wall in running bond: every row is shifted by half a brick."""
    return torch.minimum(_fold(v), 2.4 * _fold(u / 2.4 + v.floor() / 2))


def _weave(u: Tensor, v: Tensor) -> Tensor:
    """A basket: square cells that are striped one way and the other in turn."""
    upright = _parity((u / 1.5).floor(), (v / 1.5).floor()) > 0
    return 0.75 * _fold(torch.where(upright, u, v) / 0.75)


def _triangles(u: Tensor, v: Tensor) -> Tensor:
    """Triangles that point up and down in turn: three families of lines at 60 degrees."""
    w = u / 2 + v * math.sqrt(3) / 2
    edge = torch.minimum(torch.minimum(_fold(u), _fold(w)), _fold(w - u))
    return _parity(u.floor(), w.floor(), (w - u).floor()) * edge


def _spirals(u: Tensor, v: Tensor) -> Tensor:
    """Curls, one to each square of a grid."""
    x, y = (2.2 * (w / 2.2 - (w / 2.2).round()) for w in (u, v))
    return _fold(0.9 * torch.hypot(x, y) + torch.atan2(y, x) / (2 * math.pi)) / 0.9


_PATTERNS: dict[str, Pattern] = {
    "stripes": _stripes,
    "checks": _checks,
    "dots": _dots,
    "lattice": _lattice,
    "zigzag": _zigzag,
    "rings": _rings,
    "bricks": _bricks,
    "weave": _weave,
    "triangles": _triangles,
    "spirals": _spirals,
}

CLASSES: tuple[str, ...] = tuple(_PATTERNS)


def _uniform(low: float, high: float, *shape: int, generator: Generator) -> Tensor:
    """Random numbers between two bounds."""
    return low + (high - low) * torch.rand(*shape, generator=generator)


def _colours(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Two colours per image, (count, 3, 1, 1), apart in luminance so that the pattern survives a greyscale view."""
    dark = _uniform(0.12, 0.5, count, 1, generator=generator)
    bright = dark + _uniform(0.3, 0.45, count, 1, generator=generator)
    swap = torch.rand(count, 1, generator=generator) < 0.5
    grey = torch.stack([torch.where(swap, bright, dark), torch.where(swap, dark, bright)])
    tint = _uniform(-0.35, 0.35, 2, count, 3, generator=generator)
    tint -= (tint @ _LUMINANCE).unsqueeze(-1)
    first, second = (grey + tint).clamp_(0, 1)[..., None, None]
    return first, second


def _coordinates(size: int, periods: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Pixel centres in periods of the pattern, (count, size, size) each, turned and shifted at random per image."""
    count = len(periods)
    axis = (torch.arange(size) + 0.5) / size - 0.5
    angle = _uniform(0, 2 * math.pi, count, 1, 1, generator=generator)
    along, across = periods * angle.cos(), periods * angle.sin()
    shift = _uniform(0, 60, 2, count, 1, 1, generator=generator)  # many tiles, so all offsets are equally likely
    x, y = axis, axis[:, None]
    return along * x - across * y + shift[0], across * x + along * y + shift[1]


def _cover(field: Tensor, periods: Tensor, generator: Generator) -> Tensor:
    """Cut the field so that a random share of the image is foreground; edges are ramps one pixel wide.

    The cut is a quantile of the image itself: every class covers the same share of the image, so the share
    (and with it the mean and the spread of the colours) says nothing about the class.
    """
    count, size, _ = field.shape
    step = max(1, size // 32)  # a coarse grid of pixels is enough to rank by
    ranked = field[:, ::step, ::step].flatten(1).sort(dim=1).values
    share = _uniform(*_FOREGROUND, count, 1, generator=generator)
    level = ranked.gather(1, (share * ranked.shape[1]).long()).unsqueeze(-1)
    return ((level - field) * (size / periods) + 0.5).clamp_(0, 1)


def _shade(images: Tensor, generator: Generator) -> Tensor:
    """Light that falls off to one side, and sensor noise."""
    count, _, size, _ = images.shape
    axis = torch.linspace(-1, 1, size)
    slope = _uniform(-0.2, 0.2, 2, count, 1, 1, 1, generator=generator)
    light = 1 + slope[0] * axis + slope[1] * axis[:, None]
    noise = _uniform(0.01, 0.05, count, 1, 1, 1, generator=generator)
    return images * light + noise * torch.randn(images.shape, generator=generator)


def _draw_chunk(size: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """`_CHUNK` uint8 images and their labels; every run of ten images holds each class once."""
    labels = torch.rand(_CHUNK // len(CLASSES), len(CLASSES), generator=generator).argsort(dim=1).flatten()
    periods = _uniform(*_PERIODS, _CHUNK, 1, 1, generator=generator)
    u, v = _coordinates(size, periods, generator)
    field = torch.empty_like(u)
    for label, pattern in enumerate(_PATTERNS.values()):
        rows = labels == label
        field[rows] = pattern(u[rows], v[rows])
    cover = _cover(field, periods, generator)
    background, foreground = _colours(_CHUNK, generator)
    images = _shade(torch.lerp(background, foreground, cover.unsqueeze(1)), generator)
    return images.mul_(255).round_().clamp_(0, 255).to(torch.uint8), labels


def draw_textures(count: int, size: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw `count` images, uint8 (count, 3, size, size), and their labels, int64 (count,), indices into `CLASSES`.

    The same seed gives the same images, and a longer draw starts with the shorter one: every chunk has a generator
    of its own, and what is drawn beyond `count` is thrown away. Frequencies are per image, not per pixel, so a larger
    `size` shows the same kind of picture in finer detail.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if size < 8:
        raise ValueError(f"size must be at least 8 pixels, got {size}")
    seeder = Generator().manual_seed(seed)
    images = torch.empty(count, 3, size, size, dtype=torch.uint8)
    labels = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        chunk_seed = int(torch.randint(2**32, (), generator=seeder))
        chunk_images, chunk_labels = _draw_chunk(size, Generator().manual_seed(chunk_seed))
        images[start : start + _CHUNK] = chunk_images[: count - start]
        labels[start : start + _CHUNK] = chunk_labels[: count - start]
    return images, labels
