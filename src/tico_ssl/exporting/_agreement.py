"""Whether two networks compute the same features."""

from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-4  # of the largest feature; float32 in another order of sums differs by a hundredth of it


class Agreement:
    """The largest difference over all images that were compared, and how large it may be."""

    def __init__(self) -> None:
        self.difference, self.largest = 0.0, 0.0

    def compare(self, expected: Tensor, found: Tensor) -> None:
        """Take in the features of a batch."""
        if expected.shape != found.shape:
            self.difference = float("inf")
            return
        gap = float((expected - found).abs().max())
        self.difference = max(self.difference, gap if gap == gap else float("inf"))
        self.largest = max(self.largest, float(expected.abs().max()))

    @property
    def tolerance(self) -> float:
        """The difference up to which features count as the same."""
        return TOLERANCE * self.largest

    def __bool__(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return f"largest difference {self.difference:.1e}, tolerance {self.tolerance:.1e}"


@torch.no_grad()
def agreement(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], make: Callable[[int], Tensor]
) -> Agreement:
    """Compare two networks on batches of one and of three images: a fixed batch size would show."""
    found = Agreement()
    for count in (1, 3):
        images = make(count)
        found.compare(one(images), other(images))
    return found


def normal_images(channels: int, size: int) -> Callable[[int], Tensor]:
    """Batches of random images as they are after normalisation, always the same ones."""
    return lambda count: torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(count))
