"""Pixel operations of two-view augmentation: pure, batched, one parameter value per sample.

Images are float tensors (N, C, H, W) in [0, 1] and every per-sample parameter is a tensor of shape (N,) on the same
device. Nothing here reads a value back to the host and no shape depends on data, so a chain of these functions runs
alike on CPU and GPU and can be captured in a CUDA graph. For the same reason only shapes are checked, never values.

Each operation follows torchvision's functional of the same name applied to one PIL image, without PIL's rounding to
eight bits between operations. Resampling and blurring are matrix products: where reduced-precision products are
switched on (TF32, autocast) they lose accuracy accordingly; all other operations are elementwise and do not.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tico_ssl.views.resampling import resized_crop

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "colour_jitter",
    "gaussian_blur",
    "greyscale",
    "normalise",
    "resized_crop",
    "solarise",
]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
LUMA = (0.2989, 0.587, 0.114)
BLOCK = 32  # pixels blurred by one product; measured fastest of 32 to 224 on a CPU


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor``."""
    _check_colour(images, factor)
    return _blend(images, torch.zeros_like(images[:, :1]), factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance to the mean grey of the image by ``factor``."""
    _check_colour(images, factor)
    return _blend(images, _mean(_grey(images)), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance to the grey image by ``factor``."""
    _check_colour(images, factor)
    return _blend(images, _grey(images), factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift``, a fraction of the full circle; the result stays within [0, 1] by construction.

    HSV is never formed and no sextant is looked up: comparisons and selections are the slowest part of the usual form.
    """
    _check_colour(images, shift)
    red, green, blue = images.unbind(1)
    value = torch.maximum(red, torch.maximum(green, blue))
    chroma = value - torch.minimum(red, torch.minimum(green, blue))
    hue = _signed_hue(value, chroma, red, green - blue).add_(6 * _per_image(shift.to(images.dtype), 3))
    hue.sub_((hue / 6).round_(), alpha=6)
    # Each channel is the value less the chroma times a trapezium in the hue, with its floor at the channel's colour.
    turned = torch.empty_like(images)
    torch.addcmul(value, chroma, hue.abs().sub_(1).clamp_(0, 1), value=-1, out=turned[:, 0])
    torch.addcmul(value, chroma, (hue + 1).abs_().neg_().add_(2).clamp_(0, 1), value=-1, out=turned[:, 1])
    torch.addcmul(value, chroma, (hue - 1).abs_().neg_().add_(2).clamp_(0, 1), value=-1, out=turned[:, 2])
    return turned


def _signed_hue(value: Tensor, chroma: Tensor, red: Tensor, green_less_blue: Tensor) -> Tensor:
    """Hue in [-3, 3], red at 0, green at 2, blue at -2; zero for grey.

    With p = (value - red) / chroma and q = 1 - |green - blue| / chroma, the distance from red is 1 - q where red is
    the largest channel (p = 0), 1 + p where it is the middle one (q = 0) and 2 + q where it is the smallest (p = 1):
    in every case 1 + p + q (2p - 1).
    """
    per_chroma = chroma.clamp_min(torch.finfo(chroma.dtype).tiny).reciprocal_()
    p = (value - red).mul_(per_chroma)
    q = green_less_blue.abs().mul_(per_chroma).neg_().add_(1)
    distance = q.mul_(p * 2 - 1).add_(p).add_(1)
    return distance.copysign_(green_less_blue)


def colour_jitter(
    images: Tensor,
    brightness: Tensor,
    contrast: Tensor,
    saturation: Tensor,
    hue: Tensor,
    order: Tensor,
    apply: Tensor,
) -> Tensor:
    """Adjust brightness (0), contrast (1), saturation (2) and hue (3) in each sample's own ``order`` (N, 4).

    Samples with ``apply`` false are returned unchanged. The order differs between samples, yet each operation must
    not be evaluated for everybody at each of the four positions. Brightness, contrast and saturation are one blend with
    three references, so one blend per position serves all samples; and hue, the costly one, is evaluated once for all
    samples together, between the blends which precede it (positions 0 to 2) and those which follow it (1 to 3).
    """
    _check_colour(images, brightness, contrast, saturation, hue, apply)
    if order.shape != (len(images), 4):
        raise ValueError(f"expected order of shape ({len(images)}, 4), got {tuple(order.shape)}")
    order = order.long()
    factors = torch.stack([brightness, contrast, saturation, torch.ones_like(hue)], dim=1).gather(1, order)
    hue_position = (order == HUE).long().argmax(dim=1)
    jittered = images.clone()
    for position in (0, 1, 2):
        _blend_by_kind_(jittered, order[:, position], torch.where(hue_position > position, factors[:, position], 1))
    jittered = adjust_hue(jittered, hue)
    for position in (1, 2, 3):
        _blend_by_kind_(jittered, order[:, position], torch.where(hue_position < position, factors[:, position], 1))
    return torch.where(_mask(apply), jittered, images)


def _blend_by_kind_(images: Tensor, kind: Tensor, factor: Tensor) -> None:
    """Adjust brightness, contrast or saturation in place, as ``kind`` says; a factor of one changes nothing."""
    grey = _grey(images)
    flat = _mean(grey) * _per_image(kind == CONTRAST)
    _blend(images, grey.mul_(_per_image(kind == SATURATION)).add_(flat), factor, out=images)


def greyscale(images: Tensor, apply: Tensor) -> Tensor:
    """Replace all three channels by the luma where ``apply``."""
    _check_colour(images, apply)
    return torch.where(_mask(apply), _grey(images), images)


def gaussian_blur(images: Tensor, sigma: Tensor, apply: Tensor, kernel_size: int) -> Tensor:
    """Blur with a Gaussian of ``kernel_size`` taps and per-sample ``sigma`` where ``apply``, edges reflected.

    A convolution with one kernel per sample would need N x C groups, which is slow everywhere; two batched products
    with band matrices are not.
    """
    _check(images, sigma, apply)
    rows, columns = images.shape[2:]
    if kernel_size < 1 or kernel_size % 2 == 0 or kernel_size // 2 >= min(rows, columns):
        raise ValueError(f"kernel_size must be odd and fit a reflected {rows} x {columns} image, got {kernel_size}")
    taps = torch.arange(kernel_size, device=images.device, dtype=torch.float32) - kernel_size // 2
    kernel = torch.softmax(-0.5 * (taps / sigma.view(-1, 1)).square(), dim=1).to(images.dtype)
    horizontal, flat = _band_matrix(kernel, columns).mT, images.flatten(1, 2)
    blocks = [flat[..., near] @ horizontal[:, near, block] for block, near in _bands(columns, kernel_size)]
    blurred = torch.cat(blocks, dim=2).view_as(images)
    vertical = _band_matrix(kernel, rows).unsqueeze(1)
    blocks = [vertical[..., block, near] @ blurred[:, :, near] for block, near in _bands(rows, kernel_size)]
    return torch.where(_mask(apply), torch.cat(blocks, dim=2), images)


def _bands(length: int, kernel_size: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of an axis, each with the stretch it depends on: products over these skip most zeros of a band matrix."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(max(start - kernel_size // 2, 0), min(stop + kernel_size // 2, length))


def _band_matrix(kernel: Tensor, length: int) -> Tensor:
    """Matrices (N, length, length) which convolve an axis with each kernel (N, K) under reflect padding.

    Padding is folded in: a tap which falls outside the axis is added to the pixel it reflects.
    """
    n, taps = kernel.shape
    reach = torch.arange(length, device=kernel.device).view(-1, 1) + torch.arange(taps, device=kernel.device)
    last = length - 1
    column = last - (last - (reach - taps // 2).abs()).abs()
    band = torch.zeros(n, length, length, device=kernel.device, dtype=kernel.dtype)
    return band.scatter_add_(2, column.expand(n, -1, -1), kernel.unsqueeze(1).expand(-1, length, -1))


def solarise(images: Tensor, apply: Tensor, threshold: float = 0.5) -> Tensor:
    """Invert the pixels at or above ``threshold`` where ``apply``."""
    _check(images, apply)
    limit = torch.where(_mask(apply), threshold, torch.inf)
    return torch.where(images >= limit, 1 - images, images)


def normalise(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Subtract ``mean`` and divide by ``std``, one value per channel (plain numbers: nothing to copy to a device)."""
    _check(images)
    if not images.shape[1] == len(mean) == len(std):
        raise ValueError(f"expected {images.shape[1]} means and deviations, got {len(mean)} and {len(std)}")
    normalised = torch.empty_like(images)
    for channel, (m, s) in enumerate(zip(mean, std, strict=True)):
        torch.sub(images[:, channel], m, out=normalised[:, channel]).div_(s)
    return normalised


def _blend(images: Tensor, reference: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """Clip factor * images + (1 - factor) * reference; exactly the images where the factor is one."""
    return torch.lerp(reference, images, _per_image(factor.to(images.dtype)), out=out).clamp_(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Luma (N, 1, H, W), summed elementwise so that no reduced-precision product can touch it."""
    red, green, blue = images.unbind(1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)


def _mean(grey: Tensor) -> Tensor:
    return grey.mean(dim=(2, 3), keepdim=True)


def _per_image(parameter: Tensor, ndim: int = 4) -> Tensor:
    """Shape (N,) to (N, 1, ...), to broadcast against images."""
    return parameter.view(-1, *[1] * (ndim - 1))


def _mask(apply: Tensor) -> Tensor:
    return _per_image(apply.to(torch.bool))


def _check(images: Tensor, *parameters: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"expected images as (N, C, H, W), got shape {tuple(images.shape)}")
    for parameter in parameters:
        if parameter.shape != images.shape[:1]:
            raise ValueError(f"expected a parameter of shape ({len(images)},), got {tuple(parameter.shape)}")


def _check_colour(images: Tensor, *parameters: Tensor) -> None:
    _check(images, *parameters)
    if images.shape[1] != 3:
        raise ValueError(f"expected three colour channels, got {images.shape[1]}")
