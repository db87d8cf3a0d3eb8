"""Features of frozen backbones: extracted once, used by every protocol that needs no gradient."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.batches import own_share, prepared_batches
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import autocast
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.wording import counted
from tico_ssl.views import centre, operations
from tico_ssl.views.executor import sizes_of

WAITING = 32  # batches whose features stay on the device: copying them waits for all that is queued there


class Extracted(NamedTuple):
    """Features (images, width) on the CPU, and the images' indices in the source: unreadable files are left out."""

    features: Tensor
    places: Tensor


def left_out(source: Source, places: Tensor) -> list[int]:
    """The images of a source that are not at these places."""
    there = torch.zeros(len(source), dtype=torch.bool)
    there[places] = True
    missing: list[int] = (~there).nonzero().ravel().tolist()
    return missing


def image_batches(
    source: Source, backbone: Backbone, device: torch.device, whole: bool = False
) -> Iterator[tuple[Tensor, list[int]]]:
    """Batches preprocessed for a backbone, channels last, and their indices; unreadable images are left out."""

    def prepare(images: Tensor | Sequence[Tensor], _: list[int]) -> Tensor:
        return squashed(backbone, images) if whole else backbone.preprocess(images)

    dtype = next(backbone.parameters()).dtype
    shape = (backbone.config.channels, backbone.image_size, backbone.image_size)
    for images, places in prepared_batches(source, prepare, shape, device):
        yield images.to(dtype).contiguous(memory_format=torch.channels_last), places


ImageBatches = Callable[[Source, Backbone, torch.device, bool], Iterator[tuple[Tensor, list[int]]]]
"""What makes batches of a source's images for a backbone: `image_batches`, or batches that were kept."""


def squashed(backbone: Backbone, images: Tensor | Sequence[Tensor]) -> Tensor:
    """Squash resize: the whole image, without regard to its aspect ratio, where objects at the edge matter."""
    heights, widths = sizes_of(images).to(images[0].device).unbind(dim=1)
    zeros = torch.zeros_like(heights)
    pressed = operations.resized_crop(images, zeros, zeros, heights, widths, zeros, backbone.image_size)
    return operations.normalise(pressed, backbone.mean, backbone.std)


def needed_side(backbone: Backbone) -> int:
    """Shorter side, in pixels, at which an image's central crop has the resolution of the network's input."""
    return centre.needed_side(backbone.image_size)


def extract(
    backbone: Backbone,
    source: Source,
    device: torch.device,
    label: str | None = None,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    together: bool = False,
    batches: ImageBatches = image_batches,
) -> Extracted:
    """Features of every image's central crop, or of the whole image (squash resize), in evaluation mode. The
    backbone's mode is restored. With bf16 as `dtype`, matrix products are in bf16; features are float32 in any case.
    `together`: all processes make this call, each for a share of the images, and have all features afterwards."""
    return extract_all([backbone], source, device, label, whole, dtype, together, batches)[0]


@torch.no_grad()
def extract_all(
    backbones: Sequence[Backbone],
    source: Source,
    device: torch.device,
    label: str | None = None,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    together: bool = False,
    batches: ImageBatches = image_batches,
) -> list[Extracted]:
    """The same for several backbones, in one pass over the images if all see the same pixels."""
    if len({input_of(backbone) for backbone in backbones}) > 1:
        return [extract(backbone, source, device, label, whole, dtype, together, batches) for backbone in backbones]
    share, mine = own_share(source) if together else (source, torch.arange(len(source)))
    gathered = [_Rows(backbone) for backbone in backbones]
    places: list[int] = []
    for features, at in feature_batches(backbones, share, device, label, whole, dtype, batches):
        for batch, rows in zip(features, gathered, strict=True):
            rows.add(batch)
        places += at
    found = [Extracted(rows.all(), mine[places]) for rows in gathered]
    if together:
        found = [in_order(*one) for one in found]
    if not len(found[0].places):
        raise UserError(f"{source.name}: none of the {counted(len(source), 'image')} can be read")
    for backbone, one in zip(backbones, found, strict=True):
        require_finite(backbone, one.features)
    return found


def in_order(features: Tensor, places: Tensor) -> Extracted:
    """The features of all processes' images on the CPU, in the order of the images."""
    if not distributed.active():
        return Extracted(features.cpu(), places)
    everywhere = distributed.rows_of_all(places)
    order = everywhere.argsort()
    return Extracted(distributed.rows_of_all(features)[order], everywhere[order])


@torch.no_grad()
def feature_batches(
    backbones: Sequence[Backbone],
    source: Source,
    device: torch.device,
    label: str | None = None,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    batches: ImageBatches = image_batches,
) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Features of one batch after the other on the device, under every backbone, and the indices of its images."""
    with _evaluating(backbones, device):
        made = batches(source, backbones[0], device, whole)
        for images, at in track(made, len(source), label, "images", _size):
            with autocast(device, dtype):
                features = [backbone(images) for backbone in backbones]
            yield [one.to(images.dtype) for one in features], at


def input_of(backbone: Backbone) -> tuple[object, ...]:
    """What determines the pixels that a backbone sees."""
    return backbone.config.channels, backbone.image_size, backbone.mean, backbone.std, next(backbone.parameters()).dtype


def _size(batch: tuple[Tensor, list[int]]) -> int:
    return len(batch[1])


@contextmanager
def _evaluating(backbones: Sequence[Backbone], device: torch.device) -> Iterator[None]:
    """Within, backbones are on the device and in evaluation mode; afterwards they have their mode of before."""
    modes = [backbone.training for backbone in backbones]
    try:
        for backbone in backbones:
            backbone.eval().to(device)
        yield
    finally:
        for backbone, training in zip(backbones, modes, strict=True):
            backbone.train(training)


class _Rows:
    """Features of one batch after the other, moved to the CPU now and then."""

    def __init__(self, backbone: Backbone) -> None:
        self._waiting: list[Tensor] = []
        self._moved = [torch.empty(0, backbone.width, dtype=next(backbone.parameters()).dtype)]

    def add(self, features: Tensor) -> None:
        self._waiting.append(features)
        if len(self._waiting) == WAITING:
            self._move()

    def all(self) -> Tensor:
        self._move()
        return torch.cat(self._moved)

    def _move(self) -> None:
        if self._waiting:
            self._moved.append(torch.cat(self._waiting).cpu())
            self._waiting.clear()


def require_finite(backbone: Backbone, features: Tensor) -> None:
    """Refuse features that are not numbers."""
    if bad := int((~features.isfinite().all(dim=1)).sum()):
        raise UserError(
            f"{backbone.config.name} returns non-finite features for {bad} of {counted(len(features), 'image')}: "
            "its weights are damaged, or its training has diverged"
        )


def pixels(source: Source) -> Tensor:
    """Raw pixels of a source of small images, as features: the simplest baseline."""
    if source.images is None:
        raise ValueError("raw pixels need images of equal size")
    return source.take(torch.arange(len(source))).flatten(1).float() / 255
