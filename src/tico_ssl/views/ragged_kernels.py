"""Crops of ragged images on a GPU, bit for bit those that torch's own kernel makes on a CPU.

So a run may keep its images in files, in memory or on the GPU, and change that when it resumes: its views are the same.
"""

# Triton's compiler, not Python, gives the functions below their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tico_ssl.config.views import Interpolation
from tico_ssl.data.ragged import Ragged
from tico_ssl.views.kernels import HEIGHT, LEFT, MIRRORED, TOP, WIDTH
from tico_ssl.views.taps import TapTable, tap_table

EXTENTS = 256  # a table has a multiple of so many, so that batches with different largest images share one


def resized_crop(images: Ragged, box: Tensor, size: int, interpolation: Interpolation = "bicubic") -> Tensor:
    """uint8 crops (N, C, size, size); box has the columns of `PLACE`."""
    n, channels, tallest = len(images), images.channels, images.largest
    box, table = box.to(torch.float32), _table(-(-tallest // EXTENTS) * EXTENTS, size, interpolation, images.device)
    squeezed = torch.empty((n, channels, tallest, size), dtype=torch.uint8, device=box.device)
    resized = torch.empty((n, channels, size, size), dtype=torch.uint8, device=box.device)
    block = 32 if size <= 32 else 64
    steps, planes = triton.cdiv(size, block), n * channels
    _squeeze_columns[(planes, triton.cdiv(tallest, block), steps)](
        images.memory, images.begins, images.sizes, box, box.stride(0), *table, squeezed,
        tallest, channels, size, block,
    )  # fmt: skip
    _squeeze_rows[(planes, steps, steps)](squeezed, box, box.stride(0), *table, resized, tallest, channels, size, block)
    return resized


@functools.lru_cache(maxsize=16)
def _table(largest: int, size: int, interpolation: Interpolation, device: torch.device) -> TapTable:
    return tap_table(largest, size, interpolation).to(device)


@triton.jit
def _taps(about, firsts, extent, target, size: tl.constexpr):
    """Of output pixels: their first input pixel and where their weights start; the number of weights, and bits."""
    row = about + extent * 4
    first = tl.load(firsts + tl.load(row) + target, target < size, 0)
    count, bits = tl.load(row + 2), tl.load(row + 3)
    return first, tl.load(row + 1) + target * count, count, bits


@triton.jit
def _rounded(high, low, bits):
    """Sums of weights' high and low bytes as eight-bit pixels."""
    total = ((high << 8) + low + (1 << (bits - 1))) >> bits
    return tl.minimum(tl.maximum(total, 0), 255).to(tl.uint8)


@triton.jit(do_not_specialize=["tallest"])  # it differs from batch to batch while a store is filled
def _squeeze_columns(
    memory, begins, sizes, boxes, box_stride, about, firsts, weights, out,
    tallest, channels: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Resample the columns of a box; its rows are kept, starting from row zero.

    Products of bytes are exact in half precision with sums in single precision, so weights are split into two bytes, of
    which the high one is signed; sums over tiles are integers.
    """
    plane = tl.program_id(0).to(tl.int64)
    image, channel = plane // channels, plane % channels
    box = boxes + image * box_stride
    top, left = tl.load(box + TOP).to(tl.int32), tl.load(box + LEFT).to(tl.int32)
    height, width = tl.load(box + HEIGHT).to(tl.int32), tl.load(box + WIDTH).to(tl.int32)
    flip = tl.load(box + MIRRORED)
    row = tl.program_id(1) * block + tl.arange(0, block)
    if tl.program_id(1) * block < height:
        target = tl.program_id(2) * block + tl.arange(0, block)
        source = tl.where(flip > 0, size - 1 - target, target)
        source = tl.where(target < size, source, size)
        first, place, count, bits = _taps(about, firsts, width, source, size)
        begin = tl.min(tl.where(target < size, first, width), 0)
        end = tl.minimum(tl.max(tl.where(target < size, first, 0), 0) + count, width)
        stride = tl.load(sizes + image * 2 + 1).to(tl.int64) * channels
        line = memory + tl.load(begins + image) + (top + row)[:, None] * stride + left * channels + channel
        high = tl.zeros((block, block), tl.int32)
        low = tl.zeros((block, block), tl.int32)
        for start in range(begin, end, block):
            k = start + tl.arange(0, block)
            tap = k[:, None] - first[None, :]
            inside = (tap >= 0) & (tap < count) & (target < size)[None, :]
            weight = tl.load(weights + place[None, :] + tap, inside, 0).to(tl.int32)
            here = (row < height)[:, None] & (k < width)[None, :]
            pixels = tl.load(line + k[None, :] * channels, here, 0).to(tl.float16)
            high += tl.dot(pixels, (weight >> 8).to(tl.float16)).to(tl.int32)
            low += tl.dot(pixels, (weight & 255).to(tl.float16)).to(tl.int32)
        goes = out + plane * tallest * size + row[:, None] * size + target[None, :]
        tl.store(goes, _rounded(high, low, bits), (row < height)[:, None] & (target < size)[None, :])


@triton.jit(do_not_specialize=["tallest"])  # it differs from batch to batch while a store is filled
def _squeeze_rows(
    squeezed, boxes, box_stride, about, firsts, weights, out,
    tallest, channels: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Resample the rows of the result of `_squeeze_columns`."""
    plane = tl.program_id(0).to(tl.int64)
    height = tl.load(boxes + plane // channels * box_stride + HEIGHT).to(tl.int32)
    target = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.program_id(2) * block + tl.arange(0, block)
    first, place, count, bits = _taps(about, firsts, height, target, size)
    begin = tl.min(tl.where(target < size, first, height), 0)
    end = tl.minimum(tl.max(tl.where(target < size, first, 0), 0) + count, height)
    high = tl.zeros((block, block), tl.int32)
    low = tl.zeros((block, block), tl.int32)
    for start in range(begin, end, block):
        k = start + tl.arange(0, block)
        tap = k[None, :] - first[:, None]
        inside = (tap >= 0) & (tap < count) & (target < size)[:, None]
        weight = tl.load(weights + place[:, None] + tap, inside, 0).to(tl.int32)
        line = squeezed + plane * tallest * size + k[:, None] * size + column[None, :]
        pixels = tl.load(line, (k < height)[:, None] & (column < size)[None, :], 0).to(tl.float16)
        high += tl.dot((weight >> 8).to(tl.float16), pixels).to(tl.int32)
        low += tl.dot((weight & 255).to(tl.float16), pixels).to(tl.int32)
    goes = out + plane * size * size + target[:, None] * size + column[None, :]
    tl.store(goes, _rounded(high, low, bits), (target < size)[:, None] & (column < size)[None, :])
