"""Pixel operations of two-view augmentation: pure, batched, one parameter value per sample.

Images are float tensors (N, C, H, W) in [0, 1] and every per-sample parameter is a tensor of shape (N,) on the same
device. On a GPU nothing here reads a value back to the host and no shape depends on data, so a chain of these functions
can be captured in a CUDA graph. For the same reason only shapes are checked, never values. On a CPU, where values
can be read, an operation that applies to no sample is skipped (the images themselves are returned), and a batch of one
sample skips the work of mixing several orders. Images are never modified.

Each operation follows torchvision's functional of the same name applied to one PIL image, without PIL's rounding to
eight bits between operations. Resampling and blurring are matrix products, which lose accuracy under reduced precision
(TF32, autocast); all other operations are elementwise and do not.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.views.resampling import resized_crop

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "blur_kernel",
    "colour_jitter",
    "full_blur_kernel",
    "gaussian_blur",
    "greyscale",
    "normalise",
    "resized_crop",
    "solarise",
]

COLOURS = 3  # channels that the colour operations need
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
LUMA = (0.2989, 0.587, 0.114)
BLOCK = 32  # pixels per matrix product of the blur; the fastest of 16 to 56 on a CPU


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor``."""
    _check_colour(images, factor)
    return (images * _per_image(factor.to(images.dtype))).clamp_(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance to the mean grey of the image by ``factor``."""
    _check_colour(images, factor)
    factor = _per_image(factor.to(images.dtype))
    return (images * factor).add_(_mean(_grey(images)) * (1 - factor)).clamp_(0, 1)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance to the grey image by ``factor``."""
    _check_colour(images, factor)
    return _blend(images, _grey(images), factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift``, a fraction of the full circle; the result stays within [0, 1] by construction.

    HSV is not computed and no sextant is selected: comparisons and selections are the slowest part of the usual form.
    """
    _check_colour(images, shift)
    red, green, blue = images.unbind(1)
    value = torch.maximum(red, torch.maximum(green, blue))
    least = torch.minimum(red, torch.minimum(green, blue))
    chroma = value - least
    hue = _signed_hue(value, chroma, red, green - blue).add_(_per_image(shift.to(images.dtype), 3))
    hue.sub_(hue.round())
    # Each channel is a trapezium in the hue, between the value and the least: its top or its floor is a sixth from 0.
    turned = torch.empty_like(images)
    torch.addcmul(value, chroma, hue.abs().sub_(1 / 6).clamp_(0, 1 / 6), value=-6, out=turned[:, 0])
    torch.addcmul(least, chroma, (hue + 1 / 6).abs_().sub_(1 / 6).clamp_(0, 1 / 6), value=6, out=turned[:, 1])
    torch.addcmul(least, chroma, (hue - 1 / 6).abs_().sub_(1 / 6).clamp_(0, 1 / 6), value=6, out=turned[:, 2])
    return turned


def _signed_hue(value: Tensor, chroma: Tensor, red: Tensor, green_less_blue: Tensor) -> Tensor:
    """Hue in [-1/2, 1/2], red at 0, green at 1/3, blue at -1/3; zero for grey.

    With p = (value - red) / chroma and t = |green - blue| / chroma, the distance from red in sixths is t where red is
    the largest channel (p = 0), 1 + p where it is the middle one (t = 1) and 3 - t where it is the smallest (p = 1):
    in every case 3p + t (1 - 2p).
    """
    per_chroma = chroma.clamp_min(torch.finfo(chroma.dtype).tiny).reciprocal_()
    p = (value - red).mul_(per_chroma)
    distance = green_less_blue.abs().mul_(per_chroma).mul_(torch.rsub(p, 1 / 6, alpha=1 / 3)).add_(p, alpha=1 / 2)
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

    Samples with ``apply`` false are returned unchanged.
    """
    _check_colour(images, brightness, contrast, saturation, hue, apply)
    if order.shape != (len(images), 4):
        raise ValueError(f"expected order of shape ({len(images)}, 4), got {tuple(order.shape)}")
    parameters = (brightness, contrast, saturation, hue)
    if len(images) == 1 and _values_at_hand(apply):
        return _where(apply, lambda: _adjust_in_turn(images, parameters, order[0].int().tolist()), images)
    return _where(apply, lambda: _adjust_together(images, parameters, order.long()), images)


def _adjust_in_turn(images: Tensor, parameters: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """All samples in the same order."""
    adjust = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for kind in order:
        images = adjust[kind](images, parameters[kind])
    return images


def _adjust_together(images: Tensor, parameters: Sequence[Tensor], order: Tensor) -> Tensor:
    """Each sample in its own order, without evaluating every operation for all samples at each of the four positions.

    Brightness, contrast and saturation are one blend with three references, so one blend per position serves all
    samples; and hue, the costly one, is evaluated once for all samples together, between the blends that precede it
    (positions 0 to 2) and those that follow it (1 to 3).
    """
    brightness, contrast, saturation, hue = parameters
    factors = torch.stack([brightness, contrast, saturation, torch.ones_like(hue)], dim=1).gather(1, order)
    hue_position = (order == HUE).long().argmax(dim=1)
    jittered = images.clone()
    for position in (0, 1, 2):
        _blend_by_kind_(jittered, order[:, position], torch.where(hue_position > position, factors[:, position], 1))
    jittered = adjust_hue(jittered, hue)
    for position in (1, 2, 3):
        _blend_by_kind_(jittered, order[:, position], torch.where(hue_position < position, factors[:, position], 1))
    return jittered


def _blend_by_kind_(images: Tensor, kind: Tensor, factor: Tensor) -> None:
    """Adjust brightness, contrast or saturation in place, as ``kind`` says; a factor of one changes nothing."""
    grey = _grey(images)
    flat = _mean(grey) * _per_image(kind == CONTRAST)
    _blend(images, grey.mul_(_per_image(kind == SATURATION)).add_(flat), factor, out=images)


def greyscale(images: Tensor, apply: Tensor) -> Tensor:
    """Replace all three channels by the luma where ``apply``."""
    _check_colour(images, apply)
    return _where(apply, lambda: _grey(images).expand_as(images), images)


def blur_kernel(size: int) -> int:
    """An odd number of pixels near a tenth of the view: 23 for 224."""
    return 2 * (size // 20) + 1


def full_blur_kernel(size: int, sigma: float) -> int:
    """An odd number of pixels that holds 99.9 % of the variance of a Gaussian: four standard deviations on either side,
    as far as the view can be reflected."""
    return 2 * min(math.ceil(4 * sigma), size - 1) + 1


def gaussian_blur(images: Tensor, sigma: Tensor, apply: Tensor, kernel_size: int | None = None) -> Tensor:
    """Blur with a Gaussian of ``kernel_size`` taps and per-sample ``sigma`` where ``apply``, edges reflected.

    By default the kernel is a tenth of the images (`blur_kernel`).

    A convolution with one kernel per sample would need N x C groups, which is slow everywhere; batched matrix products,
    one per block of pixels, are not.
    """
    _check(images, sigma, apply)
    rows, columns = images.shape[2:]
    kernel_size = blur_kernel(columns) if kernel_size is None else kernel_size
    if kernel_size < 1 or kernel_size % 2 == 0 or kernel_size // 2 >= min(rows, columns):
        raise ValueError(f"kernel_size must be odd and fit a reflected {rows} x {columns} image, got {kernel_size}")
    radius = kernel_size // 2
    return _where(apply, lambda: _blurred(images, sigma, radius), images)


def _blurred(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    taps = torch.arange(-radius, radius + 1, device=images.device, dtype=torch.float32)
    kernel = torch.softmax(-0.5 * (taps / sigma.view(-1, 1)).square(), dim=1).to(images.dtype)
    padded = F.pad(images, [radius] * 4, mode="reflect")
    shifted = _shifted(kernel, BLOCK).unsqueeze(1)
    return _convolved_and_transposed(_convolved_and_transposed(padded, shifted), shifted)


def _convolved_and_transposed(images: Tensor, shifted: Tensor) -> Tensor:
    """Rows of images (N, C, H, W + K - 1) convolved with kernels of K taps, as columns (N, C, W, H)."""
    margin = shifted.shape[3] - BLOCK
    width = images.shape[3] - margin
    blocks = []
    for start in range(0, width, BLOCK):
        size = min(BLOCK, width - start)
        blocks.append(shifted[..., :size, : size + margin] @ images[..., start : start + size + margin].mT)
    return torch.cat(blocks, dim=2)


def _shifted(kernel: Tensor, count: int) -> Tensor:
    """Matrices (N, count, count + K - 1): each row has the kernel (N, K), shifted by one from the row above."""
    width = kernel.shape[1] + count - 1
    rows = F.pad(kernel, (0, count)).unsqueeze(1).expand(-1, count, -1).flatten(1)  # one longer than a row
    return torch.unflatten(rows[:, : count * width], 1, (count, width))


def solarise(images: Tensor, apply: Tensor, threshold: float = 0.5) -> Tensor:
    """Invert the pixels at or above ``threshold`` where ``apply``."""
    _check(images, apply)
    # A blend by zeros and ones: torch.where with a per-pixel condition takes a CPU nine times as long.
    return _where(apply, lambda: images.lerp(1 - images, images.clone().ge_(threshold)), images)


def normalise(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Subtract ``mean`` and divide by ``std``, one value per channel (Python numbers: no copy to a device)."""
    _check(images)
    if not images.shape[1] == len(mean) == len(std):
        raise ValueError(f"expected {images.shape[1]} means and standard deviations, got {len(mean)} and {len(std)}")
    normalised = torch.empty_like(images)
    for channel, (m, s) in enumerate(zip(mean, std, strict=True)):
        torch.sub(images[:, channel], m, out=normalised[:, channel]).div_(s)
    return normalised


def _blend(images: Tensor, reference: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """factor * images + (1 - factor) * reference, clipped; exactly the images where the factor is one."""
    return torch.lerp(reference, images, _per_image(factor.to(images.dtype)), out=out).clamp_(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Luma (N, 1, H, W), summed elementwise so that reduced-precision matrix products do not affect it."""
    red, green, blue = images.unbind(1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).unsqueeze_(1)


def _mean(grey: Tensor) -> Tensor:
    return grey.mean(dim=(2, 3), keepdim=True)


def _per_image(parameter: Tensor, ndim: int = 4) -> Tensor:
    """Shape (N,) to (N, 1, ...), to broadcast against images."""
    return parameter.view(-1, *[1] * (ndim - 1))


def _where(apply: Tensor, changed: Callable[[], Tensor], images: Tensor) -> Tensor:
    """``changed`` where ``apply``, the images elsewhere."""
    if _values_at_hand(apply):
        values = apply.tolist()
        if not any(values):
            return images
        if all(values):
            return changed()
    return torch.where(_per_image(apply.to(torch.bool)), changed(), images)


def _values_at_hand(parameter: Tensor) -> bool:
    """On a CPU a value can be read without synchronisation."""
    return parameter.device.type == "cpu"


def _check(images: Tensor, *parameters: Tensor) -> None:
    if images.ndim != 4:
        raise ValueError(f"expected images as (N, C, H, W), got shape {tuple(images.shape)}")
    for parameter in parameters:
        if parameter.shape != images.shape[:1]:
            raise ValueError(f"expected a parameter of shape ({len(images)},), got {tuple(parameter.shape)}")


def _check_colour(images: Tensor, *parameters: Tensor) -> None:
    _check(images, *parameters)
    if images.shape[1] != COLOURS:
        raise ValueError(f"expected three colour channels, got {images.shape[1]}")
