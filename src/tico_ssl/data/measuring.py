"""What a sample of the images says about all of them: the range of values deeper than eight bits, mean and deviation.

Samples are spread evenly, always in the same way, so the same images give the same numbers; of large images every n-th
pixel counts.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tico_ssl.config.sections import DataConfig, Limits
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.depth import Scaling, kind_of, to_bytes
from tico_ssl.data.headers import is_deep
from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

SAMPLE = 256  # images
MADE = 8  # of which so many are looked at where a caller's code makes them
PIXELS = 1 << 14  # of an image
PERCENTILES = (0.5, 99.5)
SHALLOW = (".jpg", ".jpeg", ".webp", ".bmp", ".gif")
LEAST_DEVIATION = 1 / 255  # images of a single colour have none


def depth_of(source: Source) -> str | None:
    """The kind of values deeper than eight bits, in words; None if no image of the sample has such."""
    image = source.images[:1] if source.images is not None else next(_deep_images(source), None)
    return None if image is None or image.dtype == torch.uint8 else kind_of(image.dtype)


def found_scaling(source: Source, channels: int, kind: str) -> Scaling:
    """The percentiles 0.5 and 99.5 of the sample's values: of all channels together if there are one or three, whose
    balance is a colour, else of each. Those of whole numbers are widened to whole numbers."""
    pixels = [_some_pixels(image) for image in _deep_images(source)]
    together = np.concatenate(pixels, axis=1)
    rows = together.reshape(1, -1) if channels in (1, 3) else together
    pairs = tuple(_limits(row) for row in rows)
    return Scaling(pairs[0] if len(pairs) == 1 else pairs, kind, len(pixels))


def _limits(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not len(finite):
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(finite, PERCENTILES))
    if values.dtype.kind in "ui":
        low, high = float(np.floor(low)), float(np.ceil(high))
    return low, high if high > low else low + 1


def in_bytes(source: Source, scaling: Scaling | None, limits: Limits | None) -> Source:
    """The source with all images as bytes."""
    if source.images is not None:
        if source.images.dtype == torch.uint8:
            return source
        mapped = to_bytes(source.images, limits)
        return replace(from_arrays(source.name, mapped, source.labels, source.classes), scaling=scaling)
    identity, mark = source.identity, b"" if limits is None else repr(limits).encode()
    return replace(
        source,
        fetch=lambda i: to_bytes(source.fetch(i), limits),
        identity=None if identity is None else lambda i: identity(i) + mark,
        scaling=scaling,
    )


def settled(config: DataConfig, source: Source, channels: int) -> DataConfig:
    """The settings with what was found in the images, where a recipe leaves it open: range, mean and deviation."""
    found: dict[str, object] = {} if source.scaling is None else {"range": source.scaling.limits}
    if not len(config.mean) == len(config.std) == channels:
        mean, std = statistics(source)
        found |= {"mean": mean} if len(config.mean) != channels else {}
        found |= {"std": std} if len(config.std) != channels else {}
    return config.model_copy(update=found) if found else config


def normalised(config: DataConfig) -> str:
    """Mean and deviation in words."""
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (config.mean, config.std))
    return f"channels have mean {mean} and standard deviation {std} (data.mean, data.std)"


def statistics(source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel over the pixels of the sample, from 0 to 1."""
    pixels = [_some_pixels(image) for image in _images(source.limited(SAMPLE))]
    if not pixels:
        raise UserError(f"{source.name}: none of the {counted(min(SAMPLE, len(source)), 'image')} tried can be read")
    levels = np.stack([_counts(row) for row in np.concatenate(pixels, axis=1)]) / sum(part.shape[1] for part in pixels)
    values = np.arange(256) / 255
    mean = levels @ values
    std = np.sqrt((levels * (values - mean[:, None]) ** 2).sum(axis=1)).clip(LEAST_DEVIATION)
    return tuple(round(float(value), 6) for value in mean), tuple(round(float(value), 6) for value in std)


def _counts(levels: np.ndarray) -> np.ndarray:
    return np.bincount(levels, minlength=256)


def _deep_images(source: Source) -> Iterator[Tensor]:
    """The images of the sample whose values are deeper than eight bits; headers tell of most others."""
    sample = source.limited(SAMPLE)
    for place in sample.places():
        if sample.images is None and sample.content is None and place == MADE:
            return
        try:
            if _may_be_deep(sample, place) and (image := sample.fetch(place)).dtype != torch.uint8:
                yield image
        except BadImage:
            continue


def _may_be_deep(source: Source, place: int) -> bool:
    name = source.names(place)
    if source.content is None:
        return True
    return not name.lower().endswith(SHALLOW) and is_deep(source.content(place))


def _images(source: Source) -> Iterator[Tensor]:
    for place in range(len(source)):
        try:
            yield source.fetch(place)
        except BadImage:
            continue


def _some_pixels(image: Tensor) -> np.ndarray:
    """Evenly spaced pixels of an image (channels, pixels)."""
    flat = image.reshape(len(image), -1).numpy()
    return flat[:, :: -(-flat.shape[1] // PIXELS)]
