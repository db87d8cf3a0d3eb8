"""One executor for all policies: images and decisions in, normalised views out.

All randomness is in uniform numbers, drawn for the global batch; `decide` turns them into what is done to each image:
boxes, factors, yes or no. Both are small and happen on the CPU, so the views of an image do not depend on the device,
on the number of processes or on how a run was interrupted. Carrying decisions out is a pure function without host
synchronisation: on a GPU it can be captured in a graph.
"""

import functools
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.config.views import COLOURS, ViewPolicy
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import named_generator
from tico_ssl.views import operations
from tico_ssl.views.resampling import resized_bytes, suits_kernel

try:
    from tico_ssl.views import kernels
except ImportError:  # Triton comes with torch on Linux only
    kernels = None  # type: ignore[assignment]

# What one view of one image takes, first as uniform numbers, then, column by column, as decisions:
#   place   top, left, height, width, flip
#   finish  jitter, brightness, contrast, saturation, hue, the four in their order, greyscale, blur, sigma, solarise
DRAWS = 18
PLACE, FINISH = slice(0, 5), slice(5, 18)
ORDER = slice(5, 9)  # within what finishes
PIECE_DRAWS = 16  # more of them for each piece of a jigsaw: 3 for its place, 13 to finish it
COLUMNS = {"crop": 4, "flip": 1, "jitter": 9, "greyscale": 1, "blur": 2, "solarise": 1}  # of each operation, in order
LARGE = 160  # pixels of a view from which a CPU is faster if each image goes through all steps while in its cache
PIECE = 64 / 85  # of the side of a jigsaw's cell, so that edges do not tell which pieces are neighbours


class Views:
    """Makes the views of a recipe."""

    def __init__(
        self,
        policies: Sequence[ViewPolicy],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.policies = [policy for policy in policies for _ in range(policy.count)]
        self.image_size, self.dtype = image_size, dtype
        self.mean, self.std = tuple(mean), tuple(std)
        self._place_ranges = torch.stack([place_ranges(policy) for policy in self.policies])
        self._finish_ranges = torch.stack([finish_ranges(policy) for policy in self.policies])
        for policy in policies:
            if policy.jigsaw > policy.side(image_size):
                raise UserError(f"views: {policy.side(image_size)} pixels cannot be cut into {policy.jigsaw} pieces")

    @property
    def bytes_per_image(self) -> int:
        """Of all crops of an image, one byte a value."""
        return len(self.mean) * sum(policy.side(self.image_size) ** 2 for policy in self.policies)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """All random numbers for a batch: (count, views, DRAWS), and behind those what the largest jigsaw takes.

        Every operation draws from a stream of its own, so that one that is added leaves the numbers of others alone.
        """
        seed = int(torch.randint(2**62, (), generator=generator))

        def uniforms(purpose: str, *shape: int) -> Tensor:
            return torch.rand(count, len(self.policies), *shape, generator=named_generator(seed, purpose))

        pieces = max(policy.jigsaw**2 for policy in self.policies)
        whole = [uniforms(name, columns) for name, columns in COLUMNS.items()]
        if pieces == 0:
            return torch.cat(whole, dim=2)
        finishing = [(name, columns) for name, columns in COLUMNS.items() if name not in ("crop", "flip")]
        parts = [uniforms("jigsaw", pieces, 3), *(uniforms(f"jigsaw {name}", pieces, n) for name, n in finishing)]
        return torch.cat([*whole, torch.cat(parts, dim=3).flatten(2)], dim=2)

    def decide(self, uniforms: Tensor, sizes: Tensor | None = None) -> Tensor:
        """What is done to each image, in a tensor like the uniforms. `sizes` (N, 2) are the heights and widths of the
        images; without them only what follows the crop is decided."""
        decisions = uniforms.clone()
        if sizes is not None:
            decisions[..., PLACE] = place(uniforms[..., PLACE], sizes.unsqueeze(1), self._place_ranges)
        decisions[..., FINISH] = finishing(uniforms[..., FINISH], self._finish_ranges)
        for number, policy in enumerate(self.policies):
            if policy.jigsaw > 0:
                pieces = decisions[:, number, DRAWS:].unflatten(1, (-1, PIECE_DRAWS))[..., 3:]
                pieces.copy_(finishing(pieces, self._finish_ranges[number]))
        return decisions

    def crop(self, images: Tensor | Sequence[Tensor], decisions: Tensor) -> tuple[Tensor, ...]:
        """The crops of uint8 images, resized and mirrored: one (N, C, side, side) a view, as uint8 or in [0, 1]."""
        home = images[0].device
        places = decisions[..., PLACE].to(home)
        return tuple(self._crop(images, places[:, number], policy) for number, policy in enumerate(self.policies))

    def crop_bytes(self, image: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """The same of one image (C, H, W), as uint8; uniforms are those of its place, (views, 5)."""
        sizes = torch.tensor(image.shape[-2:], dtype=uniforms.dtype)
        places = place(uniforms, sizes, self._place_ranges).int().tolist()
        return tuple(
            resized_bytes(image, box, policy.side(self.image_size))
            for box, policy in zip(places, self.policies, strict=True)
        )

    def finish(self, crops: Sequence[Tensor], decisions: Tensor) -> tuple[Tensor, ...]:
        """What follows the crop, where the decisions are. Each view is (N, C, side, side); a jigsaw is (N, pieces, C,
        side, side), so that the first axis of every view counts the same images."""
        return tuple(
            self._finish_view(crop.to(decisions.device), decisions[:, number], policy)
            for number, (crop, policy) in enumerate(zip(crops, self.policies, strict=True))
        )

    def make(self, pixels: Tensor | Sequence[Tensor], decisions: Tensor) -> tuple[Tensor, ...]:
        """The views of a batch of images (N, C, H, W), or of the crops of one."""
        return self.finish(self.crop(pixels, decisions) if isinstance(pixels, Tensor) else pixels, decisions)

    def __call__(self, images: Tensor | Sequence[Tensor], uniforms: Tensor) -> tuple[Tensor, ...]:
        """The views of uint8 images: one batch (N, C, H, W), or a sequence of (C, H, W) of any sizes."""
        decisions = self.decide(uniforms, sizes_of(images).to(uniforms.device))
        return self.finish(self.crop(images, decisions), decisions)

    def _crop(self, images: Tensor | Sequence[Tensor], places: Tensor, policy: ViewPolicy) -> Tensor:
        side = policy.side(self.image_size)
        if isinstance(images, Tensor) and images.dtype == torch.uint8 and by_kernels(images.device):
            return kernels.resized_crop(images, places, side, kernels.STORED)
        if suits_kernel(images):  # a quarter of the memory, and no bit lost
            return torch.stack([resized_bytes(*crop, side) for crop in zip(images, places.int().tolist(), strict=True)])
        top, left, height, width, flip = places.unbind(dim=1)
        return operations.resized_crop(images, top, left, height, width, flip, side)

    def _finish_view(self, crop: Tensor, decisions: Tensor, policy: ViewPolicy) -> Tensor:
        if policy.jigsaw == 0:
            return self._finish(crop, decisions[:, FINISH], policy)
        pieces = policy.jigsaw**2
        decided = decisions[:, DRAWS : DRAWS + pieces * PIECE_DRAWS].unflatten(1, (pieces, PIECE_DRAWS))
        cut = cut_jigsaw(crop, decided[..., :3], policy.jigsaw)
        finished = self._finish(cut.flatten(0, 1), decided[..., 3:].flatten(0, 1), policy)
        return finished.unflatten(0, (len(crop), pieces))

    def _finish(self, view: Tensor, decisions: Tensor, policy: ViewPolicy) -> Tensor:
        """Each piece of a jigsaw gets this on its own, lest its colours tell its neighbours."""
        if view.shape[1] == COLOURS and by_kernels(view.device):
            taps = blur_kernel(view.shape[-1]) if policy.blur > 0 else 0
            return kernels.finish(view, decisions, taps, policy.greyscale_first, self.mean, self.std, self.dtype)
        if view.device.type == "cpu" and view.shape[-1] >= LARGE and len(view) > 1:
            finished = torch.empty(view.shape, dtype=self.dtype)
            for one, part, decided in zip(finished.split(1), view.split(1), decisions.split(1), strict=True):
                one.copy_(self._finish(part, decided, policy))
            return finished
        if view.dtype == torch.uint8:
            view = view.contiguous() / 255
        d = decisions.unbind(dim=1)
        if view.shape[1] == COLOURS:
            view = _coloured(view, d, policy)
        if policy.blur > 0:
            view = operations.gaussian_blur(view, d[11], d[10], blur_kernel(view.shape[-1]))
        if policy.solarise > 0:
            view = operations.solarise(view, d[12])
        return operations.normalise(view, self.mean, self.std).to(self.dtype)


@functools.cache
def by_kernels(device: torch.device) -> bool:
    """Whether views on this device are made by the Triton kernels. One small try tells, since these need more than a
    GPU: Triton, and on first use a C compiler."""
    if device.type != "cuda" or kernels is None:
        return False
    try:
        image, box = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device=device), torch.tensor([[0.0, 0, 8, 8, 0]])
        trial = kernels.resized_crop(image, box.to(device), 8)
        kernels.finish(trial, torch.ones(1, 13, device=device), 3, False, (0.0,) * 3, (1.0,) * 3, torch.float32)
    except Exception as error:  # compilers fail in many ways; the views are the same without them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"views without Triton kernels, which is slower: {reason}", stacklevel=2)
        return False
    return True


def place_ranges(policy: ViewPolicy) -> Tensor:
    """What `place` needs to know of a policy: area, logarithm of the aspect ratio (where from, how far), flip."""
    (low, high), (narrow, wide) = policy.crop_scale, (math.log(ratio) for ratio in policy.crop_ratio)
    return torch.tensor([low, high - low, narrow, wide - narrow, policy.flip], dtype=torch.float64)


def place(uniforms: Tensor, sizes: Tensor, ranges: Tensor) -> Tensor:
    """BYOL's crop: one draw of area and aspect ratio, clipped to the image, at a uniform place; and the flip.

    Uniforms are (..., 5), sizes (..., 2) and ranges (..., 5), over any axes that broadcast.
    """
    heights, widths = sizes.to(uniforms.dtype).unbind(dim=-1)
    area, area_span, log_ratio, log_span, flip = ranges.to(uniforms).unbind(dim=-1)
    u = uniforms.unbind(dim=-1)
    area = (area + u[0] * area_span) * heights * widths
    ratio = torch.exp(log_ratio + u[1] * log_span)
    height = torch.minimum(torch.round(torch.sqrt(area / ratio)).clamp_min(1), heights)
    width = torch.minimum(torch.round(torch.sqrt(area * ratio)).clamp_min(1), widths)
    top = torch.floor(u[2] * (heights - height + 1))
    left = torch.floor(u[3] * (widths - width + 1))
    return torch.stack([top, left, height, width, (u[4] < flip).to(u[4].dtype)], dim=-1)


def finish_ranges(policy: ViewPolicy) -> Tensor:
    """What `finishing` needs to know of a policy: for each column where its value begins, how far it goes, and its
    probability if it is a yes or no, else NaN."""
    strengths = (policy.brightness, policy.contrast, policy.saturation)
    factors = [(low := max(0.0, 1 - strength), 1 + strength - low, math.nan) for strength in strengths]
    low, high = policy.blur_sigma
    columns = [
        (0, 0, policy.jitter),
        *factors,
        (-policy.hue, 2 * policy.hue, math.nan),
        *[(0, 1, math.nan)] * 4,
        (0, 0, policy.greyscale),
        (0, 0, policy.blur),
        (low, high - low, math.nan),
        (0, 0, policy.solarise),
    ]
    return torch.tensor(columns, dtype=torch.float64).T


def finishing(uniforms: Tensor, ranges: Tensor) -> Tensor:
    """Uniforms (..., 13) as factors, an order and yes or no; see the head of this file for the columns."""
    low, span, probability = ranges.to(uniforms).unbind(dim=-2)
    decided = torch.where(probability.isnan(), low + uniforms * span, (uniforms < probability).to(uniforms.dtype))
    decided[..., ORDER] = uniforms[..., ORDER].argsort(dim=-1).to(uniforms.dtype)
    return decided


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


def sizes_of(images: Tensor | Sequence[Tensor]) -> Tensor:
    """Heights and widths (N, 2) of images."""
    if isinstance(images, Tensor):
        return torch.tensor(images.shape[-2:], dtype=torch.float32).expand(len(images), 2)
    return torch.tensor([image.shape[-2:] for image in images], dtype=torch.float32).view(-1, 2)


def _coloured(view: Tensor, decisions: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    steps = [_jittered, _greyscaled]
    for step in reversed(steps) if policy.greyscale_first else steps:
        view = step(view, decisions, policy)
    return view


def _jittered(view: Tensor, decisions: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    if policy.jitter == 0:
        return view
    apply, brightness, contrast, saturation, hue, *order = decisions[:9]
    return operations.colour_jitter(view, brightness, contrast, saturation, hue, torch.stack(order, dim=1), apply)


def _greyscaled(view: Tensor, decisions: Sequence[Tensor], policy: ViewPolicy) -> Tensor:
    return operations.greyscale(view, decisions[9]) if policy.greyscale > 0 else view
