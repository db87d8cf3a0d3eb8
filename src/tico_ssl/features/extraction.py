"""Features of frozen backbones: extracted once, used by every protocol that needs no gradient."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from tico_ssl.data.bad_files import attempts
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track
from tico_ssl.views import operations
from tico_ssl.views.centre import KEPT
from tico_ssl.views.executor import sizes_of

BATCH = 256
WORKERS = 4  # threads that decode files


class Extracted(NamedTuple):
    """Features (images, width) on the CPU, and the images' indices in the source: unreadable files are left out."""

    features: Tensor
    places: Tensor


def raw_batches(source: Source) -> Iterator[tuple[Tensor | list[Tensor], list[int]]]:
    """Batches of uint8 images and their indices, in order; images that cannot be read are left out."""
    if source.images is not None:
        for places in torch.arange(len(source)).split(BATCH):
            yield source.take(places), places.tolist()
        return
    results = enumerate(attempts(source, range(len(source)), WORKERS))
    while chunk := list(islice(results, BATCH)):
        good = [(place, image) for place, image in chunk if not isinstance(image, BadImage)]
        if good:
            yield [image for _, image in good], [place for place, _ in good]


def image_batches(
    source: Source, backbone: Backbone, device: torch.device, whole: bool = False
) -> Iterator[tuple[Tensor, list[int]]]:
    """The same, preprocessed for a backbone."""
    dtype = next(backbone.parameters()).dtype
    preprocess = partial(squashed, backbone) if whole else backbone.preprocess
    for images, places in raw_batches(source):
        moved = images.to(device) if isinstance(images, Tensor) else images
        yield preprocess(moved).to(device, dtype), places


def squashed(backbone: Backbone, images: Tensor | Sequence[Tensor]) -> Tensor:
    """Squash resize: the whole image, without regard to its aspect ratio, where objects at the edge matter."""
    heights, widths = sizes_of(images).to(images[0].device).unbind(dim=1)
    zeros = torch.zeros_like(heights)
    pressed = operations.resized_crop(images, zeros, zeros, heights, widths, zeros, backbone.image_size)
    return operations.normalise(pressed, backbone.mean, backbone.std)


def needed_side(backbone: Backbone) -> int:
    """Shorter side, in pixels, at which an image's central crop has the resolution of the network's input."""
    return math.ceil(backbone.image_size / KEPT)


@torch.no_grad()
def extract(
    backbone: Backbone, source: Source, device: torch.device, label: str | None = None, whole: bool = False
) -> Extracted:
    """Features of every image's central crop, or of the whole image (squash resize), in evaluation mode. The
    backbone's mode is restored."""
    training = backbone.training
    backbone.eval().to(device)
    features, places = [], []
    for images, at in track(image_batches(source, backbone, device, whole), -(-len(source) // BATCH), label):
        features.append(backbone(images).cpu())  # float32: evaluations should not depend on bf16 support
        places += at
    backbone.train(training)
    if not features:
        raise UserError(f"{source.name}: none of the {len(source)} images can be read")
    found = Extracted(torch.cat(features), torch.tensor(places))
    if bad := int((~found.features.isfinite().all(dim=1)).sum()):
        raise UserError(
            f"{backbone.config.name} returns non-finite features for {bad} of {len(places)} images: "
            "its weights are damaged, or its training has diverged"
        )
    return found


def pixels(source: Source) -> Tensor:
    """Raw pixels of a source of small images, as features: the simplest baseline."""
    if source.images is None:
        raise ValueError("raw pixels need images of equal size")
    return source.take(torch.arange(len(source))).flatten(1).float() / 255
