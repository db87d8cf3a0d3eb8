"""One executor for all policies: a batch of images and a matrix of uniform numbers in, normalised views out.

All randomness is in the uniforms: `draw` makes them for the global batch on the CPU, so the views of an image do not
depend on the device, on the number of processes or on how a run was interrupted. What is done with them is a pure
function without host synchronisation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.errors import UserError
from tico_ssl.views import operations
from tico_ssl.views.policy import COLOURS, ViewPolicy

DRAWS = 18  # uniform numbers that one view of one image takes: 5 for the crop and the flip, 13 for what follows
PLACE, FINISH = slice(0, 5), slice(5, 18)
PIECE_DRAWS = 16  # more of them for each piece of a jigsaw: 3 for its place, 13 for what follows
PIECE = 64 / 85  # of the side of a jigsaw's cell, so that edges do not tell which pieces are neighbours


class Views:
    """Makes the views of a recipe."""

    def __init__(
        self, policies: Sequence[ViewPolicy], image_size: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.policies = [policy for policy in policies for _ in range(policy.count)]
        self.image_size = image_size
        self.mean, self.std = tuple(mean), tuple(std)
        for policy in policies:
            if policy.jigsaw > policy.side(image_size):
                raise UserError(f"views: {policy.side(image_size)} pixels cannot be cut into {policy.jigsaw} pieces")

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """All random numbers for a batch: (count, views, DRAWS), and behind those what the largest jigsaw takes.

        The first DRAWS are drawn first, so they do not depend on whether there is a jigsaw.
        """
        pieces = max(policy.jigsaw**2 for policy in self.policies)
        columns = (DRAWS, pieces * PIECE_DRAWS)
        return torch.cat([torch.rand(count, len(self.policies), n, generator=generator) for n in columns], dim=2)

    def __call__(self, images: Tensor | Sequence[Tensor], uniforms: Tensor) -> tuple[Tensor, ...]:
        """The views of uint8 images: one batch (N, C, H, W), or a sequence of (C, H, W) of any sizes.

        Each view is (N, C, side, side); a jigsaw is (N, pieces, C, side, side), so that the first axis of every view
        counts the same images. The crop runs where the images are, the rest where the uniforms are.
        """
        return tuple(self._view(images, uniforms[:, number], policy) for number, policy in enumerate(self.policies))

    def _view(self, images: Tensor | Sequence[Tensor], uniforms: Tensor, policy: ViewPolicy) -> Tensor:
        home = images[0].device
        heights, widths = _sizes(images, home)
        u = uniforms[:, PLACE].to(home).unbind(dim=1)
        box = crop_boxes(u[:4], heights, widths, policy)
        view = operations.resized_crop(images, *box, u[4] < policy.flip, policy.side(self.image_size))
        view = view.to(uniforms.device)
        if policy.jigsaw == 0:
            return self._finished(view, uniforms[:, FINISH], policy)
        pieces = policy.jigsaw**2
        u_pieces = uniforms[:, DRAWS : DRAWS + pieces * PIECE_DRAWS].unflatten(1, (pieces, PIECE_DRAWS))
        view = cut_jigsaw(view, u_pieces[..., :3], policy.jigsaw)
        finished = self._finished(view.flatten(0, 1), u_pieces[..., 3:].flatten(0, 1), policy)
        return finished.unflatten(0, (len(uniforms), pieces))

    def _finished(self, view: Tensor, uniforms: Tensor, policy: ViewPolicy) -> Tensor:
        """What follows the crop. Each piece of a jigsaw gets this on its own, lest its colours tell its neighbours."""
        u = uniforms.unbind(dim=1)
        if view.shape[1] == COLOURS:
            view = _coloured(view, u[:10], policy)
        if policy.blur > 0:
            low, high = policy.blur_sigma
            sigma = low + u[11] * (high - low)
            view = operations.gaussian_blur(view, sigma, u[10] < policy.blur, blur_kernel(view.shape[-1]))
        if policy.solarise > 0:
            view = operations.solarise(view, u[12] < policy.solarise)
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


def cut_jigsaw(images: Tensor, u: Tensor, grid: int) -> Tensor:
    """Square images (N, C, S, S) and uniforms (N, grid**2, 3) to pieces (N, grid**2, C, P, P) in random order.

    As Noroozi and Favaro cut their puzzles: one piece from each cell of the grid, 64 of its 85 pixels wide and high if
    S is 255, at a uniform place within the cell.
    """
    cell = images.shape[-1] // grid
    side = piece_side(cell)
    order = u[..., 2].argsort(dim=1, stable=True)
    within = torch.floor(u[..., :2] * (cell - side + 1)).long()
    top, left = order // grid * cell + within[..., 0], order % grid * cell + within[..., 1]
    along = torch.arange(side, device=images.device)
    rows, columns = top[..., None, None] + along[:, None], left[..., None, None] + along
    number = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    return images.permute(0, 2, 3, 1)[number, rows, columns].permute(0, 1, 4, 2, 3).contiguous()


def piece_side(cell: int) -> int:
    """Pixels of a jigsaw's piece that is cut from a cell of so many."""
    return max(1, round(cell * PIECE))


def _coloured(view: Tensor, u: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    if policy.greyscale_first:
        return _jittered(_greyscaled(view, u[9], policy), u[:9], policy)
    return _greyscaled(_jittered(view, u[:9], policy), u[9], policy)


def _jittered(view: Tensor, u: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    if policy.jitter == 0:
        return view
    strengths = (policy.brightness, policy.contrast, policy.saturation)
    brightness, contrast, saturation = (_factor(number, strength) for number, strength in zip(u[1:4], strengths))
    hue = (2 * u[4] - 1) * policy.hue
    order = torch.stack(tuple(u[5:9]), dim=1).argsort(dim=1)
    return operations.colour_jitter(view, brightness, contrast, saturation, hue, order, u[0] < policy.jitter)


def _greyscaled(view: Tensor, u: Tensor, policy: ViewPolicy) -> Tensor:
    return operations.greyscale(view, u < policy.greyscale) if policy.greyscale > 0 else view


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
