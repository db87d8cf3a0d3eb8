"""Measured ceilings of the device: matmul throughput and memory bandwidth."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tico_ssl.bench.timing import time_calls

SIDE = {"cuda": 8192}  # of the square matrices
CPU_SIDE = 1024
COPIED = 2**28  # bytes, larger than any cache


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device: matmuls in the training precision, and memory traffic (read plus write)."""

    flops_per_second: float
    bytes_per_second: float

    def higher(self, other: "Ceilings") -> "Ceilings":
        """The higher of two measurements of each."""
        return Ceilings(
            max(self.flops_per_second, other.flops_per_second), max(self.bytes_per_second, other.bytes_per_second)
        )


def measure_ceilings(device: torch.device, precision: torch.dtype, seconds: float) -> Ceilings:
    """Time square matmuls in this precision, and a copy within device memory."""
    side = SIDE.get(device.type, CPU_SIDE)
    a, b = torch.randn(2, side, side, device=device, dtype=precision)
    product = torch.empty_like(a)
    with _products_like_convolutions():
        multiplying = statistics.median(time_calls(lambda: torch.mm(a, b, out=product), seconds, device))
    original = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    copy = torch.empty_like(original)
    copying = statistics.median(time_calls(lambda: copy.copy_(original), seconds, device))
    return Ceilings(2 * side**3 / multiplying, 2 * COPIED / copying)


@contextmanager
def _products_like_convolutions() -> Iterator[None]:
    """By default torch uses TF32 for float32 convolutions, most of the work, but not for matmuls; the ceiling must hold
    for both."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
