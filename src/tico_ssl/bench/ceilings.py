"""What the device can do at best, measured: matrix products and copies of memory."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tico_ssl.bench.timing import time_calls

SIDE = {"cuda": 8192}  # of the square matrices
CPU_SIDE = 1024
COPIED = 2**28  # bytes, more than any cache holds


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device: products in the training precision, and memory read plus written."""

    flops_per_second: float
    bytes_per_second: float


def measure_ceilings(device: torch.device, precision: torch.dtype, seconds: float) -> Ceilings:
    """Square matrix products in this precision, and a copy from memory to memory."""
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
    """On GPUs torch rounds the float32 inputs of convolutions, most of the work, but by default not those of products;
    the ceiling must hold for both."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
