"""Common corruptions of images, as pure functions on batches of uint8 (N, C, H, W).

Types and severities are those of Hendrycks and Dietterich (2019) for the nearest image size: CIFAR-10-C up to 32
pixels, Tiny ImageNet-C up to 64, ImageNet-C above. Corruptions that need photographs of frost, ImageMagick or OpenCV
are left out. Values are rounded to bytes, where theirs are truncated.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tico_ssl.data.opening import open_picture
from tico_ssl.evaluations._representation.settings import SIZES, STRENGTHS
from tico_ssl.runtime.errors import UserError, suggestion

TRUNCATE = 4.0  # standard deviations at which a Gaussian is truncated


def strength(name: str, severity: int, size: int) -> float:
    """The parameter of a corruption for an image size."""
    if name not in STRENGTHS:
        raise UserError(f"no corruption is called '{name}'{suggestion(name, STRENGTHS)}")
    row = next((i for i, known in enumerate(SIZES) if size <= known), len(SIZES) - 1)
    return STRENGTHS[name][row][severity - 1]


def corrupt(images: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupted images, uint8 as before and on the CPU; the generator's state determines the noise."""
    amount = strength(name, severity, max(images.shape[-2:]))
    if name in ON_BYTES:
        return ON_BYTES[name](images, amount)
    return (ON_VALUES[name](images.float() / 255, amount, generator).clamp(0, 1) * 255).round().to(torch.uint8)


def _gaussian_noise(x: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    return x + deviation * torch.randn(x.shape, generator=generator)


def _shot_noise(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Salt and pepper: this fraction of the values becomes one or zero, with equal probability."""
    drawn = torch.rand(x.shape, generator=generator)
    return torch.where(drawn < share, (drawn < share / 2).to(x.dtype), x)


def _gaussian_blur(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Separable, with replicated edges."""
    radius = int(TRUNCATE * sigma + 0.5)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / sigma).square())
    kernel = kernel / kernel.sum()
    flat = F.pad(x.flatten(0, 1).unsqueeze(1), [radius] * 4, mode="replicate")
    return F.conv2d(F.conv2d(flat, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1)).view(x.shape)


def _contrast(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Scales the difference from each channel's mean."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    return (x - mean) * factor + mean


def _brightness(x: Tensor, added: float, generator: torch.Generator) -> Tensor:
    """Added to the value in HSV, which is the largest channel; hue and saturation stay."""
    value = x.amax(dim=1, keepdim=True)
    brighter = (value + added).clamp_max(1)
    return torch.where(value > 0, x * (brighter / value.clamp_min(1e-6)), brighter)


def _jpeg(images: Tensor, quality: float) -> Tensor:
    def through(picture: Image.Image) -> Image.Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        return open_picture(file)

    return _each(images, through)


def _pixelate(images: Tensor, share: float) -> Tensor:
    height, width = images.shape[-2:]
    small = max(1, int(width * share)), max(1, int(height * share))
    box = Image.Resampling.BOX
    return _each(images, lambda picture: picture.resize(small, box).resize((width, height), box))


def _each(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """RGB images through Pillow; of other images every channel by itself."""
    if images.shape[1] == 3:
        pictures = (Image.fromarray(image) for image in images.permute(0, 2, 3, 1).contiguous().numpy())
        return torch.from_numpy(np.stack([np.asarray(change(p)) for p in pictures])).permute(0, 3, 1, 2).contiguous()
    pictures = (Image.fromarray(image) for image in images.flatten(0, 1).contiguous().numpy())
    return torch.from_numpy(np.stack([np.asarray(change(p)) for p in pictures])).view(images.shape)


ON_VALUES: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "gaussian-noise": _gaussian_noise,
    "shot-noise": _shot_noise,
    "impulse-noise": _impulse_noise,
    "gaussian-blur": _gaussian_blur,
    "contrast": _contrast,
    "brightness": _brightness,
}
ON_BYTES: dict[str, Callable[[Tensor, Any], Tensor]] = {"jpeg": _jpeg, "pixelate": _pixelate}
