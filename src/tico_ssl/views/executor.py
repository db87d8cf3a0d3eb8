"""One executor for all policies: images and decisions in, normalised views out.

All randomness is in uniform numbers, drawn for the global batch; `decide` maps them to decisions per image: boxes,
factors, yes or no. Both are small and run on the CPU, so the views of an image do not depend on the device, the number
of processes or interruptions. Applying the decisions is a pure function without host synchronisation, which can be
captured in a CUDA graph. All three follow the table of operations.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.config.views import ViewPolicy
from tico_ssl.data.ragged import Ragged
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import named_generator
from tico_ssl.views import operations
from tico_ssl.views.geometry import Boxes, cut_jigsaw
from tico_ssl.views.resampling import resized_bytes, suits_kernel
from tico_ssl.views.table import (
    CROP,
    FLIP,
    JIGSAW,
    OPERATIONS,
    PLACE,
    RETRIES,
    Layout,
    Operation,
    at_work,
    blur_taps,
)

try:
    from tico_ssl.views import kernels, ragged_kernels
except ImportError:  # Triton comes with torch on Linux only
    kernels = ragged_kernels = None  # type: ignore[assignment]

LARGE = 160  # pixels of a view from which a CPU is faster image by image, since one image stays in its cache
BOX = PLACE.columns(CROP)


class Views:
    """Makes the views of a recipe; `table` lists the operations after the crop. The first columns of its numbers are
    those of `place`, which say where a view is cut."""

    def __init__(
        self,
        policies: Sequence[ViewPolicy],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        table: Sequence[Operation] = OPERATIONS,
    ) -> None:
        self.policies = [policy for policy in policies for _ in range(policy.count)]
        self.image_size, self.dtype, self.table = image_size, dtype, tuple(table)
        self.mean, self.std = tuple(mean), tuple(std)
        self._boxes = Boxes(self.policies)
        self.place = Layout((*PLACE.draws, RETRIES)) if self._boxes.retried else PLACE
        self._whole, self._piece = Layout((*self.place.draws, *table)), Layout((JIGSAW, *table))
        self._rules, self._piece_rules = self._whole.rules(self.policies), self._piece.rules(self.policies)
        for policy in policies:
            if policy.jigsaw > policy.side(image_size):
                raise UserError(f"views: {policy.side(image_size)} pixels cannot be cut into {policy.jigsaw} pieces")

    @property
    def bytes_per_image(self) -> int:
        """Size of all crops of an image as uint8."""
        return len(self.mean) * sum(policy.side(self.image_size) ** 2 for policy in self.policies)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """All random numbers of a batch: (count, views, columns). The columns of whole views are followed by those of
        jigsaw pieces, for the largest jigsaw.

        Every operation draws from its own random stream, so that adding one does not change the numbers of the others.
        """
        seed = int(torch.randint(2**62, (), generator=generator))

        def uniforms(stream: str, *shape: int) -> Tensor:
            return torch.rand(count, len(self.policies), *shape, generator=named_generator(seed, stream))

        drawn = [uniforms(draw.name, draw.width) for draw in self._whole.draws]
        pieces = max(policy.jigsaw**2 for policy in self.policies)
        if pieces > 0:
            parts = [uniforms(f"jigsaw {operation.name}", pieces, operation.width) for operation in self.table]
            cuts = uniforms(JIGSAW.name, pieces, JIGSAW.width)
            drawn.append(torch.cat([cuts, *parts], dim=3).flatten(2))
        return torch.cat(drawn, dim=2)

    def decide(self, uniforms: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Decisions per image, in a tensor like the uniforms. `sizes` (N, 2) are the heights and widths of the images;
        without them crop boxes are left undecided."""
        whole, pieces = uniforms.tensor_split([self._whole.width], dim=-1)
        decisions = self._decide(self._whole, whole, None if sizes is None else sizes.unsqueeze(1))
        if pieces.shape[-1] == 0:
            return decisions
        decisions = torch.cat([decisions, pieces], dim=-1)
        for number, policy in enumerate(self.policies):
            if policy.jigsaw > 0:
                undecided = self._pieces(decisions[:, number])
                undecided.copy_(self._piece.decide(undecided, self._piece_rules[:, number]))
        return decisions

    def _decide(self, layout: Layout, uniforms: Tensor, sizes: Tensor | None) -> Tensor:
        """Decide by a layout that equals that of whole views or is a prefix of it."""
        decisions = layout.decide(uniforms, self._rules[..., : layout.width])
        if sizes is not None:
            retries = uniforms[..., PLACE.width : self.place.width]
            decisions[..., BOX] = self._boxes(uniforms[..., BOX], retries, sizes)
        return decisions

    def _pieces(self, numbers: Tensor) -> Tensor:
        """The columns of jigsaw pieces, (N, pieces, columns), of one view (N, columns)."""
        return torch.unflatten(numbers[:, self._whole.width :], 1, (-1, self._piece.width))

    def crop(self, images: Tensor | Sequence[Tensor] | Ragged, decisions: Tensor) -> tuple[Tensor, ...]:
        """The crops of uint8 images, resized and flipped: (N, C, side, side) per view, as uint8 or in [0, 1]. Those of
        ragged images are those of `crop_bytes`, to the bit, on any device."""
        device = images.device if isinstance(images, Ragged) else images[0].device
        places = decisions[..., : PLACE.width].to(device)
        return tuple(self._crop(images, places[:, number], policy) for number, policy in enumerate(self.policies))

    def crop_bytes(self, image: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
        """The same for one image (C, H, W), as uint8; `uniforms` (views, columns) are those of `place`."""
        sizes = torch.tensor(image.shape[-2:], dtype=uniforms.dtype)
        places = self._decide(self.place, uniforms, sizes)[:, : PLACE.width].int().tolist()
        return tuple(
            resized_bytes(image, place, policy.side(self.image_size), policy.interpolation)
            for place, policy in zip(places, self.policies, strict=True)
        )

    def finish(self, crops: Sequence[Tensor], decisions: Tensor) -> tuple[Tensor, ...]:
        """The operations after the crop, on the device of the decisions. A view is (N, C, side, side), a jigsaw (N,
        pieces, C, side, side), so that the first axis is always the image."""
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

    def _crop(self, images: Tensor | Sequence[Tensor] | Ragged, places: Tensor, policy: ViewPolicy) -> Tensor:
        side = policy.side(self.image_size)
        if isinstance(images, Ragged) and by_kernels(images.device):
            return ragged_kernels.resized_crop(images, places, side, policy.interpolation)
        if isinstance(images, Tensor) and images.dtype == torch.uint8 and by_kernels(images.device):
            dtype = kernels.STORED if self._finished_by_kernels(images, policy) else torch.float32
            return kernels.resized_crop(images, places, side, dtype, policy.interpolation)
        if isinstance(images, Ragged) or suits_kernel(images):  # a quarter of the memory, without loss
            crops = zip(images, places.int().tolist(), strict=True)
            return torch.stack([resized_bytes(*crop, side, policy.interpolation) for crop in crops])
        box, flip = PLACE.named(places, CROP), PLACE.named(places, FLIP)["apply"]
        return operations.resized_crop(images, **box, flip=flip, size=side, interpolation=policy.interpolation)

    def _finish_view(self, crop: Tensor, decisions: Tensor, policy: ViewPolicy) -> Tensor:
        if policy.jigsaw == 0:
            return self._finish(crop, decisions, self._whole, policy)
        pieces = policy.jigsaw**2
        decided = self._pieces(decisions)[:, :pieces]
        cut = cut_jigsaw(crop, decided[..., self._piece.columns(JIGSAW)], policy.jigsaw)
        finished = self._finish(cut.flatten(0, 1), decided.flatten(0, 1), self._piece, policy)
        return torch.unflatten(finished, 0, (len(crop), pieces))

    def _finish(self, view: Tensor, decisions: Tensor, layout: Layout, policy: ViewPolicy) -> Tensor:
        """Jigsaw pieces are finished separately, so that common colours do not reveal neighbours."""
        if by_kernels(view.device) and self._finished_by_kernels(view, policy):
            taps = blur_taps(policy, view.shape[-1]) if policy.blur > 0 else 0
            columns = decisions[:, layout.columns(*OPERATIONS)]
            return kernels.finish(view, columns, taps, policy.greyscale_first, self.mean, self.std, self.dtype)
        if view.device.type == "cpu" and view.shape[-1] >= LARGE and len(view) > 1:
            finished = torch.empty(view.shape, dtype=self.dtype)
            parts = (torch.split(values, 1) for values in (finished, view, decisions))
            for one, part, decided in zip(*parts, strict=True):
                one.copy_(self._finish(part, decided, layout, policy))
            return finished
        if view.dtype == torch.uint8:
            view = view.contiguous() / 255
        for operation in at_work(policy, view.shape[1], self.table):
            view = operation(view, layout.named(decisions, operation), policy)
        return operations.normalise(view, self.mean, self.std).to(self.dtype)

    def _finished_by_kernels(self, view: Tensor, policy: ViewPolicy) -> bool:
        """Whether the kernels implement all active operations of a policy. They expect their columns where the
        package's table puts them, so another table has to start with that one."""
        wanted = {operation.name for operation in at_work(policy, view.shape[1], self.table)}
        known = self.table[: len(OPERATIONS)] == OPERATIONS
        return known and view.shape[1] == operations.COLOURS and wanted <= kernels.IMPLEMENTED


def by_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels make the views on this device. A GPU on which they fail is noted as a fallback."""
    if device.type != "cuda" or kernels is None:
        return False
    if (reason := _no_kernels(device)) is not None:
        fallbacks.note("kernels", reason)
    return reason is None


@functools.cache
def _no_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels do not run on a GPU, found by a small trial: they need Triton and, on first use, a C
    compiler."""
    assert kernels is not None
    try:
        image = torch.zeros(1, operations.COLOURS, 8, 8, dtype=torch.uint8, device=device)
        trial = kernels.resized_crop(image, torch.ones(1, PLACE.width, device=device), 8)
        decisions = torch.ones(1, kernels.COLUMNS.width, device=device)
        kernels.finish(trial, decisions, 3, False, (0.0,) * 3, (1.0,) * 3, torch.float32)
    except Exception as error:  # compilers fail in many ways; the views are the same without them
        return fallbacks.reason_of(error)
    return None


@functools.cache
def crops_ragged(device: torch.device) -> bool:
    """Whether a device cuts crops of ragged images as the CPU does, to the bit, found by a small trial."""
    if not by_kernels(device):
        return False
    image = (torch.arange(3 * 90 * 110) * 7919 % 256).to(torch.uint8).view(3, 90, 110)
    box = torch.zeros(1, PLACE.width)
    box[0, BOX] = torch.tensor([3.0, 5.0, 80.0, 100.0])
    expected = resized_bytes(image, box[0].int().tolist(), 24)
    try:
        found = ragged_kernels.resized_crop(Ragged.of([image]).to(device), box.to(device), 24)
    except Exception:  # compilers fail in many ways; workers cut the same crops
        return False
    return torch.equal(found[0].cpu(), expected)


def sizes_of(images: Tensor | Sequence[Tensor]) -> Tensor:
    """Heights and widths (N, 2) of images."""
    if isinstance(images, Tensor):
        return torch.tensor(images.shape[-2:], dtype=torch.float32).expand(len(images), 2)
    return torch.tensor([image.shape[-2:] for image in images], dtype=torch.float32).view(-1, 2)
