"""One executor for all policies: a batch of images and a matrix of uniform numbers in, normalised views out.

All randomness is in the uniforms: `draw` makes them for the global batch on the CPU, so the views of an image do not
depend on the device, on the number of processes or on how a run was interrupted. What is done with them is a pure
function without host synchronisation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.views import operations
from tico_ssl.views.policy import ViewPolicy

DRAWS = 18  # uniform numbers that one view of one image takes


class Views:
    """Makes the views of a recipe."""

    def __init__(
        self, policies: Sequence[ViewPolicy], image_size: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.policies = [policy for policy in policies for _ in range(policy.count)]
        self.image_size = image_size
        self.mean, self.std = tuple(mean), tuple(std)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """All random numbers for a batch: (count, views, DRAWS)."""
        return torch.rand(count, len(self.policies), DRAWS, generator=generator)

    def __call__(self, images: Tensor | Sequence[Tensor], uniforms: Tensor) -> tuple[Tensor, ...]:
        """The views of uint8 images: one batch (N, C, H, W), or a sequence of (C, H, W) of any sizes.

        The crop runs where the images are, the rest where the uniforms are.
        """
        return tuple(self._view(images, uniforms[:, number], policy) for number, policy in enumerate(self.policies))

    def _view(self, images: Tensor | Sequence[Tensor], uniforms: Tensor, policy: ViewPolicy) -> Tensor:
        size = policy.size or self.image_size
        home = images[0].device
        heights, widths = _sizes(images, home)
        u = uniforms.to(home).unbind(dim=1)
        top, left, height, width = crop_boxes(u[:4], heights, widths, policy)
        view = operations.resized_crop(images, top, left, height, width, u[4] < policy.flip, size)
        view, u = view.to(uniforms.device), uniforms.unbind(dim=1)
        if view.shape[1] == 3:  # colours need three channels
            view = _coloured(view, u[5:15], policy)
        if policy.blur > 0:
            low, high = policy.blur_sigma
            sigma = low + u[16] * (high - low)
            view = operations.gaussian_blur(view, sigma, u[15] < policy.blur, blur_kernel(size))
        if policy.solarise > 0:
            view = operations.solarise(view, u[17] < policy.solarise)
        return operations.normalise(view, self.mean, self.std)


def crop_boxes(
    u: Sequence[Tensor], heights: Tensor, widths: Tensor, policy: ViewPolicy
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """BYOL's crop: one draw of area and aspect ratio, clipped to the image, at a uniform place."""
    low, high = policy.crop_scale
    area = (low + u[0] * (high - low)) * heights * widths
    log_low, log_high = (math.log(ratio) for ratio in policy.crop_ratio)
    ratio = torch.exp(log_low + u[1] * (log_high - log_low))
    height = torch.minimum(torch.round(torch.sqrt(area / ratio)).clamp_min(1), heights)
    width = torch.minimum(torch.round(torch.sqrt(area * ratio)).clamp_min(1), widths)
    top = torch.floor(u[2] * (heights - height + 1))
    left = torch.floor(u[3] * (widths - width + 1))
    return top, left, height, width


def blur_kernel(size: int) -> int:
    """An odd number of pixels near a tenth of the view: 23 for 224."""
    return 2 * (size // 20) + 1


def _coloured(view: Tensor, u: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    if policy.jitter > 0:
        strengths = (policy.brightness, policy.contrast, policy.saturation)
        brightness, contrast, saturation = (_factor(number, strength) for number, strength in zip(u[1:4], strengths))
        hue = (2 * u[4] - 1) * policy.hue
        order = torch.stack(tuple(u[5:9]), dim=1).argsort(dim=1)
        view = operations.colour_jitter(view, brightness, contrast, saturation, hue, order, u[0] < policy.jitter)
    if policy.greyscale > 0:
        view = operations.greyscale(view, u[9] < policy.greyscale)
    return view


def _factor(uniform: Tensor, strength: float) -> Tensor:
    low = max(0.0, 1 - strength)
    return low + uniform * (1 + strength - low)


def _sizes(images: Tensor | Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    if isinstance(images, Tensor):
        height, width = images.shape[-2:]
        ones = torch.ones(len(images), device=device)
        return ones * height, ones * width
    shapes = torch.tensor([image.shape[-2:] for image in images], dtype=torch.float32, device=device)
    return shapes[:, 0], shapes[:, 1]
