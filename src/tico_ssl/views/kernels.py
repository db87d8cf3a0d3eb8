"""The view operations as Triton kernels: what `operations` defines, in five launches instead of a hundred.

Pixels are stored in half precision between kernels, with an error of at most half an eight-bit step; matrix products
accumulate in single precision. Resampling and blurring are products with band matrices whose entries are computed on
the fly, so no matrix is stored and few of its zeros are multiplied. Colours are changed by one program per image:
branches are uniform within a program, and an image that is not jittered or blurred costs next to nothing.
"""

# Triton's compiler, not Python, gives the functions below their types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tico_ssl.config.views import Interpolation
from tico_ssl.views import operations
from tico_ssl.views.table import BLUR, CROP, FLIP, GREYSCALE, JITTER, OPERATIONS, PLACE, SOLARISE, Layout

IMPLEMENTED = {"jitter", "greyscale", "blur", "solarise"}  # a policy with other active operations uses the operators
STORED = torch.float16  # between kernels
REACH: dict[Interpolation, int] = {"bilinear": 1, "bicubic": 2}  # of a resampling kernel, in pixels

# Columns of a box.
TOP = tl.constexpr(PLACE.place(CROP, "top"))
LEFT = tl.constexpr(PLACE.place(CROP, "left"))
HEIGHT = tl.constexpr(PLACE.place(CROP, "height"))
WIDTH = tl.constexpr(PLACE.place(CROP, "width"))
MIRRORED = tl.constexpr(PLACE.place(FLIP, "apply"))

# Columns of what follows.
COLUMNS = Layout(OPERATIONS)
JITTERED = tl.constexpr(COLUMNS.place(JITTER, "apply"))
FACTORS = tl.constexpr(COLUMNS.place(JITTER, "brightness"))  # then contrast and saturation, as their kinds
SHIFT = tl.constexpr(COLUMNS.place(JITTER, "hue"))
ORDER = tl.constexpr(COLUMNS.place(JITTER, "order"))
GREY = tl.constexpr(COLUMNS.place(GREYSCALE, "apply"))
BLURRED = tl.constexpr(COLUMNS.place(BLUR, "apply"))
SIGMA = tl.constexpr(COLUMNS.place(BLUR, "sigma"))
SOLARISED = tl.constexpr(COLUMNS.place(SOLARISE, "apply"))

# Kinds of the jitter's steps, the values of its order.
CONTRAST = tl.constexpr(operations.CONTRAST)
SATURATION = tl.constexpr(operations.SATURATION)
HUE = tl.constexpr(operations.HUE)


def resized_crop(
    images: Tensor,
    box: Tensor,
    size: int,
    dtype: torch.dtype = torch.float32,
    interpolation: Interpolation = "bicubic",
) -> Tensor:
    """`operations.resized_crop` of uint8 images (N, C, H, W); box has the columns of `PLACE`."""
    n, channels, rows, columns = images.shape
    images, box = images.contiguous(), box.to(torch.float32)
    squeezed = images.new_empty((n, channels, rows, size), dtype=STORED)
    resized = images.new_empty((n, channels, size, size), dtype=dtype)
    block = 32 if size <= 32 else 64
    steps = triton.cdiv(size, block)
    fixed = (size, REACH[interpolation], block)
    planes, boxes = n * channels, (box, box.stride(0))
    _squeeze_columns[(planes, triton.cdiv(rows, block), steps)](
        images, *boxes, squeezed, channels, rows, columns, *fixed
    )
    _squeeze_rows[(planes, steps, steps)](squeezed, *boxes, resized, channels, rows, *fixed)
    return resized


def finish(
    crops: Tensor,
    decisions: Tensor,
    blur_kernel: int,
    greyscale_first: bool,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """Colours, blur, solarisation and normalisation of crops (N, 3, S, S), which are uint8 or float in [0, 1].

    `decisions` has the columns of `COLUMNS`. A blur_kernel of zero means no blur. The result is in the
    channels-last format.
    """
    n, _, size, _ = crops.shape
    crops, decisions = crops.contiguous(), decisions.to(torch.float32)
    finished = torch.empty_like(crops, dtype=dtype, memory_format=torch.channels_last)
    coloured = torch.empty_like(crops, dtype=STORED) if blur_kernel else finished
    means, shares = tuple(mean), tuple(1 / s for s in std)
    about = (decisions, decisions.stride(0))
    block = min(1024, triton.next_power_of_2(size * size))
    _colour[(n,)](
        crops, *about, finished, coloured, *means, *shares, size * size,
        block, crops.dtype == torch.uint8, greyscale_first, blur_kernel > 0,
    )  # fmt: skip
    if blur_kernel:
        blurred = torch.empty_like(coloured)
        half = blur_kernel // 2
        tile, near = 32, triton.next_power_of_2(32 + 2 * half)
        steps = triton.cdiv(size, tile)
        _blur_columns[(n * 3, steps)](coloured, *about, blurred, size, half, tile, near)
        _blur_rows[(n, steps, triton.cdiv(size, 64))](
            blurred, *about, finished, *means, *shares, size, half, tile, near, 64
        )
    return finished


@triton.jit
def _weight(distance, reach: tl.constexpr):
    """The kernel that ends at this distance, as in `resampling`: the triangle (1) or Keys' cubic (2)."""
    outer = tl.maximum(reach - tl.abs(distance), 0.0)
    if reach == 1:
        weight = outer
    else:
        inner = tl.maximum(outer - 1, 0.0)
        weight = (outer - 1) * outer * outer * 0.5 + inner * inner * (1 - 2 * inner)
    return weight


@triton.jit
def _covered(target, extent, size: tl.constexpr, reach: tl.constexpr):
    """Positions of output pixels in the box, stretch of the kernel, and range of box pixels that it covers."""
    scale = extent / size
    stretch = tl.maximum(scale, 1.0)
    centre = (target + 0.5) * scale
    begin = tl.maximum(tl.min(centre, 0) - reach * stretch - 1, 0).to(tl.int32)
    end = tl.minimum(tl.max(centre, 0) + reach * stretch + 1, extent).to(tl.int32)
    return centre, stretch, begin, end


@triton.jit
def _squeeze_columns(
    images, boxes, box_stride, out,
    channels: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, size: tl.constexpr, reach: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Resample the columns of a box; its rows are kept, starting from row zero."""
    plane = tl.program_id(0).to(tl.int64)
    box = boxes + plane // channels * box_stride
    top, left = tl.load(box + TOP).to(tl.int32), tl.load(box + LEFT).to(tl.int32)
    height, width, flip = tl.load(box + HEIGHT).to(tl.int32), tl.load(box + WIDTH), tl.load(box + MIRRORED)
    row = tl.program_id(1) * block + tl.arange(0, block)
    if tl.program_id(1) * block < height:
        target = tl.program_id(2) * block + tl.arange(0, block)
        source = tl.where(flip > 0, size - 1 - target, target)
        centre, stretch, begin, end = _covered(source, width, size, reach)
        line = images + plane * rows * columns + (top + row)[:, None] * columns + left
        total = tl.zeros((block,), tl.float32)
        values = tl.zeros((block, block), tl.float32)
        for start in range(begin, end, block):
            k = start + tl.arange(0, block)
            inside = (k < width)[:, None] & (target < size)[None, :]
            distance = (k[:, None] + 0.5 - centre[None, :]) / stretch
            weight = tl.where(inside, _weight(distance, reach), 0.0).to(tl.float16)
            total += tl.sum(weight.to(tl.float32), 0)
            here = (row < height)[:, None] & (k < width)[None, :]
            values += tl.dot(tl.load(line + k[None, :], here, 0).to(tl.float16), weight)
        values = tl.clamp(values / (255 * tl.where(target < size, total, 1.0))[None, :], 0.0, 1.0)
        place = out + plane * rows * size + row[:, None] * size + target[None, :]
        tl.store(place, values, (row < height)[:, None] & (target < size)[None, :])


@triton.jit
def _squeeze_rows(
    squeezed, boxes, box_stride, out,
    channels: tl.constexpr, rows: tl.constexpr, size: tl.constexpr, reach: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Resample the rows of the result of `_squeeze_columns`."""
    plane = tl.program_id(0).to(tl.int64)
    height = tl.load(boxes + plane // channels * box_stride + HEIGHT)
    target = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.program_id(2) * block + tl.arange(0, block)
    centre, stretch, begin, end = _covered(target, height, size, reach)
    total = tl.zeros((block,), tl.float32)
    values = tl.zeros((block, block), tl.float32)
    for start in range(begin, end, block):
        k = start + tl.arange(0, block)
        inside = (target < size)[:, None] & (k < height)[None, :]
        distance = (k[None, :] + 0.5 - centre[:, None]) / stretch
        weight = tl.where(inside, _weight(distance, reach), 0.0).to(tl.float16)
        total += tl.sum(weight.to(tl.float32), 1)
        line = squeezed + plane * rows * size + k[:, None] * size + column[None, :]
        values += tl.dot(weight, tl.load(line, (k < height)[:, None] & (column < size)[None, :], 0.0))
    values = tl.clamp(values / tl.where(target < size, total, 1.0)[:, None], 0.0, 1.0)
    place = out + plane * size * size + target[:, None] * size + column[None, :]
    tl.store(place, values, (target < size)[:, None] & (column < size)[None, :])


@triton.jit
def _luma(red, green, blue):
    return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _turned(red, green, blue, shift):
    """Hue, as in `operations.adjust_hue`."""
    value = tl.maximum(red, tl.maximum(green, blue))
    chroma = value - tl.minimum(red, tl.minimum(green, blue))
    share = 1 / tl.maximum(chroma, 1e-12)
    p = (value - red) * share
    q = 1 - tl.abs(green - blue) * share
    distance = 1 + p + q * (2 * p - 1)
    hue = tl.where(green < blue, -distance, distance) + 6 * shift
    hue -= 6 * tl.floor(hue / 6 + 0.5)
    red = value - chroma * tl.clamp(tl.abs(hue) - 1, 0.0, 1.0)
    green = value - chroma * tl.clamp(2 - tl.abs(hue + 1), 0.0, 1.0)
    blue = value - chroma * tl.clamp(2 - tl.abs(hue - 1), 0.0, 1.0)
    return red, green, blue


@triton.jit
def _adjusted(red, green, blue, kind, decision, mean):
    """One step of the jitter: brightness, contrast, saturation or hue."""
    if kind == HUE:
        red, green, blue = _turned(red, green, blue, tl.load(decision + SHIFT))
    else:
        factor = tl.load(decision + FACTORS + kind)
        flat, grey = tl.where(kind == CONTRAST, mean, 0.0), tl.where(kind == SATURATION, 1.0, 0.0)
        reference = flat + grey * _luma(red, green, blue)
        red = tl.clamp(reference + factor * (red - reference), 0.0, 1.0)
        green = tl.clamp(reference + factor * (green - reference), 0.0, 1.0)
        blue = tl.clamp(reference + factor * (blue - reference), 0.0, 1.0)
    return red, green, blue


@triton.jit
def _colours(image, at, pixels, grey, as_bytes: tl.constexpr, grey_first: tl.constexpr):
    """Red, green and blue of some pixels, converted to grey if that comes before the jitter."""
    there = at < pixels
    red = tl.load(image + at, there, 0).to(tl.float32)
    green = tl.load(image + pixels + at, there, 0).to(tl.float32)
    blue = tl.load(image + 2 * pixels + at, there, 0).to(tl.float32)
    if as_bytes:
        red, green, blue = red / 255, green / 255, blue / 255
    if grey_first:
        luma = _luma(red, green, blue)
        red, green, blue = tl.where(grey, luma, red), tl.where(grey, luma, green), tl.where(grey, luma, blue)
    return red, green, blue


@triton.jit
def _normalised(values, limit, mean, share):
    """Solarise above a threshold, which is out of range for images without solarisation, and normalise."""
    return (tl.where(values >= limit, 1 - values, values) - mean) * share


@triton.jit
def _colour(
    crops, decisions, stride, finished, coloured, mean0, mean1, mean2, share0, share1, share2,
    pixels: tl.constexpr, block: tl.constexpr, as_bytes: tl.constexpr, grey_first: tl.constexpr, may_blur: tl.constexpr,
):  # fmt: skip
    """Jitter and greyscale of one image; without blur, also the remaining operations."""
    number = tl.program_id(0).to(tl.int64)
    decision, image = decisions + number * stride, crops + number * 3 * pixels
    jitter, grey = tl.load(decision + JITTERED) > 0, tl.load(decision + GREY) > 0
    order = decision + ORDER
    kinds = (
        tl.load(order).to(tl.int32), tl.load(order + 1).to(tl.int32),
        tl.load(order + 2).to(tl.int32), tl.load(order + 3).to(tl.int32),
    )  # fmt: skip
    mean = 0.0
    if jitter:  # contrast needs the mean grey at its position in the order, so the steps before it are computed twice
        total = tl.zeros((block,), tl.float32)
        for start in range(0, pixels, block):
            at = start + tl.arange(0, block)
            red, green, blue = _colours(image, at, pixels, grey, as_bytes, grey_first)
            waiting = True
            for position in tl.static_range(4):
                waiting = waiting & (kinds[position] != CONTRAST)
                if waiting:
                    red, green, blue = _adjusted(red, green, blue, kinds[position], decision, 0.0)
            total += tl.where(at < pixels, _luma(red, green, blue), 0.0)
        mean = tl.sum(total, 0) / pixels
    limit = tl.where(tl.load(decision + SOLARISED) > 0, 0.5, 2.0)
    for start in range(0, pixels, block):
        at = start + tl.arange(0, block)
        red, green, blue = _colours(image, at, pixels, grey, as_bytes, grey_first)
        if jitter:
            for position in tl.static_range(4):
                red, green, blue = _adjusted(red, green, blue, kinds[position], decision, mean)
        if grey and not grey_first:
            red = _luma(red, green, blue)
            green, blue = red, red
        there, out = at < pixels, number * 3 * pixels
        blurred = may_blur & (tl.load(decision + BLURRED) > 0)
        if blurred:
            tl.store(coloured + out + at, red, there)
            tl.store(coloured + out + pixels + at, green, there)
            tl.store(coloured + out + 2 * pixels + at, blue, there)
        else:
            tl.store(finished + out + 3 * at, _normalised(red, limit, mean0, share0), there)
            tl.store(finished + out + 3 * at + 1, _normalised(green, limit, mean1, share1), there)
            tl.store(finished + out + 3 * at + 2, _normalised(blue, limit, mean2, share2), there)


@triton.jit
def _gaussian(distance, sigma, half: tl.constexpr):
    scaled = distance / sigma
    return tl.where(tl.abs(distance) <= half, tl.exp(-0.5 * scaled * scaled), 0.0)


@triton.jit
def _band(target, source, sigma, size: tl.constexpr, half: tl.constexpr):
    """Entries of the band matrix: taps beyond an edge are added to the reflected pixels. Not normalised."""
    weight = _gaussian(source - target, sigma, half)
    weight += tl.where(source > 0, _gaussian(-source - target, sigma, half), 0.0)
    weight += tl.where(source < size - 1, _gaussian(2 * (size - 1) - source - target, sigma, half), 0.0)
    return tl.where((source >= 0) & (source < size) & (target < size), weight, 0.0).to(tl.float16)


@triton.jit
def _blur_columns(
    coloured, decisions, stride, out,
    size: tl.constexpr, half: tl.constexpr, tile: tl.constexpr, near: tl.constexpr,
):  # fmt: skip
    """Blur some columns of one channel along its rows; the weights are computed once for all rows."""
    plane = tl.program_id(0).to(tl.int64)
    decision = decisions + plane // 3 * stride
    if tl.load(decision + BLURRED) > 0:
        first = tl.program_id(1) * tile
        target, source = first + tl.arange(0, tile), first - half + tl.arange(0, near)
        weight = _band(target[None, :], source[:, None], tl.load(decision + SIGMA), size, half)
        total = tl.sum(weight.to(tl.float32), 0)
        share = 1 / tl.where(total > 0, total, 1.0)
        inside = (source >= 0) & (source < size)
        for start in range(0, size, 64):
            row = (start + tl.arange(0, 64))[:, None]
            base = plane * size * size + row * size
            values = tl.dot(tl.load(coloured + base + source[None, :], (row < size) & inside[None, :], 0.0), weight)
            tl.store(out + base + target[None, :], values * share[None, :], (row < size) & (target < size)[None, :])


@triton.jit
def _blur_rows(
    blurred, decisions, stride, finished, mean0, mean1, mean2, share0, share1, share2,
    size: tl.constexpr, half: tl.constexpr, tile: tl.constexpr, near: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Blur along the columns, solarise and normalise: a tile of all three channels."""
    number = tl.program_id(0).to(tl.int64)
    decision = decisions + number * stride
    if tl.load(decision + BLURRED) > 0:
        first = tl.program_id(1) * tile
        target, source = first + tl.arange(0, tile), first - half + tl.arange(0, near)
        weight = _band(target[:, None], source[None, :], tl.load(decision + SIGMA), size, half)
        total = tl.sum(weight.to(tl.float32), 1)
        scale = 1 / tl.where(total > 0, total, 1.0)
        column = tl.program_id(2) * wide + tl.arange(0, wide)
        here = ((source >= 0) & (source < size))[:, None] & (column < size)[None, :]
        there = (target < size)[:, None] & (column < size)[None, :]
        line = blurred + number * 3 * size * size + source[:, None] * size + column[None, :]
        place = finished + number * 3 * size * size + 3 * (target[:, None] * size + column[None, :])
        limit = tl.where(tl.load(decision + SOLARISED) > 0, 0.5, 2.0)
        red = tl.dot(weight, tl.load(line, here, 0.0)) * scale[:, None]
        tl.store(place, _normalised(red, limit, mean0, share0), there)
        green = tl.dot(weight, tl.load(line + size * size, here, 0.0)) * scale[:, None]
        tl.store(place + 1, _normalised(green, limit, mean1, share1), there)
        blue = tl.dot(weight, tl.load(line + 2 * size * size, here, 0.0)) * scale[:, None]
        tl.store(place + 2, _normalised(blue, limit, mean2, share2), there)
