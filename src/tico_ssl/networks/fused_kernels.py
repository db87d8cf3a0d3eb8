"""Fused BatchNorm, residual sum and ReLU on a GPU: the arithmetic of torch's modules with a third of the traffic.

On an H200 two thirds of a ResNet-50's step are spent between the convolutions, and torch's statistics of channels-last
images in bf16 alone take as long as the forward pass of all convolutions. Here an activation is read once for its
statistics and once for the transform; in the backward pass, once for the sums and once for the gradient. The mask of
ReLU is recomputed rather than stored.

With the rows of a channels-last activation as x (M, C), scale = weight / sqrt(variance + eps), z = dL/d(before ReLU):

    y  = relu(scale (x - mean) + bias + residual)
    dx = scale (z - mean(z) - xhat mean(z xhat)),   d residual = z,   d weight = sum(z xhat),   d bias = sum(z)

A batch may consist of several views, equal parts of its rows, each with its own mean and variance: convolutions then
run once over all of them, and the result is that of one pass per view.

Several processes, each with an equal share of the batch, exchange mean and variance in the forward pass (one gather)
and both means of the gradient in the backward pass (one sum); the rest is the same.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as Norm

from tico_ssl.runtime import distributed

TILE = 4096  # values per tile of a program
FINISHED = 16  # channels per program that reduces partial sums
TOGETHER = tl.constexpr(256)  # partial sums per tile of it
WAVES = 4  # summing programs per multiprocessor: the fewest that saturate memory bandwidth
MANY_ROWS = 65536  # from which wide tiles read faster. All measured on an H200.


def norm_act(
    norm: Norm, x: Tensor, residual: Tensor | None, relu: bool, views: int = 1, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """relu(norm(x) + residual) of a BatchNorm in training, for two consumers; the kernel adds their gradients. If
    `shared`, statistics are those of all processes."""
    both: tuple[Tensor, Tensor] = _NormAct.apply(x, norm.weight, norm.bias, residual, norm, relu, views, shared)
    return both


def running_norm_act(norm: Norm, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """relu(norm(x) + residual) of a BatchNorm in evaluation mode, without a gradient."""
    channels = x.shape[1]
    rows = x.numel() // channels
    across = min(64, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, across)
    statistics = torch.empty((4, channels), device=x.device, dtype=torch.float32)
    _running_statistics[(blocks,)](
        norm.weight, norm.bias, norm.running_mean, norm.running_var, statistics, channels, norm.eps, across
    )
    y = torch.empty_like(x)
    other = x if residual is None else residual.to(x.dtype).contiguous(memory_format=torch.channels_last)
    down = TILE // across
    _transform[(triton.cdiv(rows, down), blocks)](
        x, other, statistics, y, rows, channels, residual is not None, relu, down, across
    )
    return y


def max_pool(x: Tensor) -> Tensor:
    """3 x 3 max-pooling with stride 2, as in the stem of a ResNet."""
    pooled: Tensor = _MaxPool.apply(x)
    return pooled


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        norm: Norm,
        relu: bool,
        views: int,
        shared: bool,
    ) -> tuple[Tensor, Tensor]:
        context.set_materialize_grads(False)  # often there is one consumer
        channels = x.shape[1]
        rows = x.numel() // channels // views
        y = torch.empty_like(x)
        if residual is not None:
            residual = residual.to(x.dtype).contiguous(memory_format=torch.channels_last)
        # for each view: mean, 1 / standard deviation, scale, offset
        statistics = torch.empty((views, 4, channels), device=x.device, dtype=torch.float32)
        partial, splits, shape = _plan(x, rows, channels, views, 128 if rows * views > MANY_ROWS else 64)
        warps = 8 if shape[2] == 64 else 4
        _sums[(splits, shape[0], views)](x, partial, rows, channels, splits, *shape[1:], num_warps=warps)
        finishing, shares = (triton.cdiv(channels, FINISHED),), 0
        if shared:
            local = torch.empty((views, 2, channels), device=x.device, dtype=torch.float32)
            _moments[finishing](partial, x, local, rows, channels, splits, views, FINISHED)
            partial = distributed.stacked(local, distributed.STATISTICS)
            shares = len(partial)
        _finish_sums[finishing](
            partial, x, weight, bias, statistics, norm.running_mean, norm.running_var, norm.num_batches_tracked,
            rows, channels, splits, views, norm.eps, norm.momentum, shares, FINISHED,
        )  # fmt: skip
        grid = triton.cdiv(rows, shape[1]), shape[0], views
        other = x if residual is None else residual
        _transform[grid](x, other, statistics, y, rows, channels, residual is not None, relu, *shape[1:])
        context.save_for_backward(x, weight, statistics, y if residual is not None and relu else x)
        context.settings = residual is not None, relu, bias.dtype, views, shares
        return y, y.detach()

    @staticmethod
    def backward(context: Any, dy: Tensor | None, other_dy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, statistics, y = context.saved_tensors
        has_residual, relu, bias_dtype, views, shares = context.settings
        first, second = (None if d is None else d.contiguous(memory_format=torch.channels_last) for d in (dy, other_dy))
        if first is None:
            first, second = second, None
        assert first is not None
        channels = x.shape[1]
        rows = x.numel() // channels // views
        # The mask of ReLU: read from y if a residual was added, recomputed from x otherwise.
        gate = 0 if not relu else 2 if has_residual else 1
        # z is stored if it is the residual's gradient, or a sum that would otherwise be computed twice.
        keeps = gate == 2 or second is not None
        z = torch.empty_like(x) if keeps else first
        partial, splits, shape = _plan(x, rows, channels, views)
        _gradient_sums[(splits, shape[0], views)](
            first, first if second is None else second, x, y, statistics, partial, z,
            rows, channels, splits, gate, second is not None, keeps, *shape[1:],
        )  # fmt: skip
        # d bias, d weight, and for each view the two means of the formula above
        sums = torch.empty((2 + 2 * views, channels), device=x.device, dtype=torch.float32)
        _finish_gradient_sums[(triton.cdiv(channels, FINISHED),)](
            partial, statistics, sums, rows * max(1, shares), channels, splits, views, FINISHED
        )
        if shares:
            distributed.add_up(sums[2:], distributed.STATISTICS)
        dx = torch.empty_like(x)
        grid = triton.cdiv(rows, shape[1]), shape[0], views
        _gradient[grid](z, x, statistics, sums, dx, rows, channels, gate == 1 and not keeps, *shape[1:])
        return dx, sums[1].to(weight.dtype), sums[0].to(bias_dtype), z if has_residual else None, *[None] * 4


def _plan(
    x: Tensor, rows: int, channels: int, views: int, across: int = 64
) -> tuple[Tensor, int, tuple[int, int, int]]:
    """Buffer for partial sums, number of programs that share the rows of a view, and (blocks of channels, tile)."""
    across = min(across, triton.next_power_of_2(channels))
    down = TILE // across
    blocks = triton.cdiv(channels, across)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    splits = max(1, min(triton.cdiv(rows, down), processors * WAVES // (blocks * views)))
    partial = torch.empty((views, splits, 2, channels), device=x.device, dtype=torch.float32)
    return partial, splits, (blocks, down, across)


@triton.jit
def _channels(channels, across: tl.constexpr):
    """The channels of this program, and their mask."""
    channel = tl.program_id(1) * across + tl.arange(0, across)
    return channel, channel < channels


@triton.jit
def _tile(number, channel, known, rows, channels, down: tl.constexpr):
    """Offsets of a tile, and its mask."""
    row = (number * down + tl.arange(0, down)).to(tl.int64)
    return row[:, None] * channels + channel[None, :], (row < rows)[:, None] & known[None, :]


@triton.jit
def _view(rows, channels):
    """This program's view, and the offset of its first value."""
    view = tl.program_id(2)
    return view, view.to(tl.int64) * rows * channels


@triton.jit
def _sums(x, partial, rows, channels, splits, down: tl.constexpr, across: tl.constexpr):
    """Sums and sums of squares over every splits-th tile, shifted by the first row to avoid cancellation."""
    split = tl.program_id(0)
    view, start = _view(rows, channels)
    x += start
    channel, known = _channels(channels, across)
    origin = tl.load(x + channel, known, 0.0).to(tl.float32)[None, :]
    total = tl.zeros((down, across), tl.float32)
    squares = tl.zeros((down, across), tl.float32)
    for number in range(split, tl.cdiv(rows, down), splits):
        at, exists = _tile(number, channel, known, rows, channels, down)
        value = tl.where(exists, tl.load(x + at, exists, 0.0).to(tl.float32) - origin, 0.0)
        total += value
        squares += value * value
    out = partial + (view * splits + split) * 2 * channels + channel
    tl.store(out, tl.sum(total, 0), known)
    tl.store(out + channels, tl.sum(squares, 0), known)


@triton.jit
def _added(partial, view, channels, splits, channel, known, across: tl.constexpr):
    """Both partial sums of a view, reduced over all splits."""
    first = tl.zeros((TOGETHER, across), tl.float32)
    second = tl.zeros((TOGETHER, across), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        exists = (split < splits)[:, None] & known[None, :]
        at = partial + (view * splits + split)[:, None] * 2 * channels + channel[None, :]
        first += tl.load(at, exists, 0.0)
        second += tl.load(at + channels, exists, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _own_moments(partial, x, view, rows, channels, splits, channel, known, across: tl.constexpr):
    """Mean and variance of a view that begins at x, from its partial sums."""
    first, second = _added(partial, view, channels, splits, channel, known, across)
    origin = tl.load(x + channel, known, 0.0).to(tl.float32)
    mean = first / rows
    variance = tl.maximum(second / rows - mean * mean, 0.0)
    return mean + origin, variance


@triton.jit
def _moments(partial, x, out, rows, channels, splits, views, across: tl.constexpr):
    """Mean and variance of every view in this process."""
    channel = tl.program_id(0) * across + tl.arange(0, across)
    known = channel < channels
    for view in range(views):
        mean, variance = _own_moments(partial, x, view, rows, channels, splits, channel, known, across)
        tl.store(out + view * 2 * channels + channel, mean, known)
        tl.store(out + (view * 2 + 1) * channels + channel, variance, known)
        x += rows * channels


@triton.jit
def _joint_moments(moments, view, views, channels, shares: tl.constexpr, channel, known, across: tl.constexpr):
    """Mean and variance of a view over all processes, from those of each."""
    mean = tl.zeros((across,), tl.float32)
    variance = tl.zeros((across,), tl.float32)
    for share in range(shares):
        mean += tl.load(moments + (share * views + view) * 2 * channels + channel, known, 0.0)
    mean /= shares
    for share in range(shares):
        at = moments + (share * views + view) * 2 * channels + channel
        apart = tl.load(at, known, 0.0) - mean
        variance += tl.load(at + channels, known, 0.0) + apart * apart
    return mean, variance / shares


@triton.jit
def _finish_sums(
    partial, x, weight, bias, statistics, running_mean, running_variance, batches,
    rows, channels, splits, views, eps, momentum, shares: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    """Mean and variance, the coefficients of the transform, and the running statistics, which see view after view. With
    shares, `partial` holds the moments of each, otherwise sums."""
    channel = tl.program_id(0) * across + tl.arange(0, across)
    known = channel < channels
    average = tl.load(running_mean + channel, known, 0.0)
    spread = tl.load(running_variance + channel, known, 0.0)
    everywhere = rows * shares if shares > 0 else rows
    for view in range(views):
        if shares > 0:
            mean, variance = _joint_moments(partial, view, views, channels, shares, channel, known, across)
        else:
            mean, variance = _own_moments(partial, x, view, rows, channels, splits, channel, known, across)
        inverse = 1 / tl.sqrt(variance + eps)
        scale = tl.load(weight + channel, known, 0.0).to(tl.float32) * inverse
        out = statistics + view * 4 * channels + channel
        tl.store(out, mean, known)
        tl.store(out + channels, inverse, known)
        tl.store(out + 2 * channels, scale, known)
        tl.store(out + 3 * channels, tl.load(bias + channel, known, 0.0).to(tl.float32) - mean * scale, known)
        average += momentum * (mean - average)
        spread += momentum * (variance * (everywhere / tl.maximum(everywhere - 1, 1)) - spread)
        x += rows * channels
    tl.store(running_mean + channel, average, known)
    tl.store(running_variance + channel, spread, known)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + views)


@triton.jit
def _running_statistics(weight, bias, running_mean, running_variance, statistics, channels, eps, across: tl.constexpr):
    """The coefficients of the transform, from running statistics."""
    channel = tl.program_id(0) * across + tl.arange(0, across)
    known = channel < channels
    variance = tl.load(running_variance + channel, known, 1.0)
    scale = tl.load(weight + channel, known, 0.0).to(tl.float32) / tl.sqrt(variance + eps)
    offset = tl.load(bias + channel, known, 0.0).to(tl.float32) - tl.load(running_mean + channel, known, 0.0) * scale
    tl.store(statistics + 2 * channels + channel, scale, known)
    tl.store(statistics + 3 * channels + channel, offset, known)


@triton.jit
def _transform(
    x, residual, statistics, y, rows, channels,
    adds: tl.constexpr, relu: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    view, start = _view(rows, channels)
    channel, known = _channels(channels, across)
    at, exists = _tile(tl.program_id(0), channel, known, rows, channels, down)
    at += start
    statistics += view * 4 * channels
    scale = tl.load(statistics + 2 * channels + channel, known, 0.0)[None, :]
    offset = tl.load(statistics + 3 * channels + channel, known, 0.0)[None, :]
    value = tl.load(x + at, exists, 0.0).to(tl.float32) * scale + offset
    if adds:
        value += tl.load(residual + at, exists, 0.0).to(tl.float32)
    if relu:
        value = tl.maximum(value, 0.0)
    tl.store(y + at, value, exists)


@triton.jit
def _gradient_sums(
    dy, other_dy, x, y, statistics, partial, kept, rows, channels, splits,
    gate: tl.constexpr, adds: tl.constexpr, keeps: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    """Sums of z and of z (x - mean) over every splits-th tile."""
    split = tl.program_id(0)
    view, start = _view(rows, channels)
    channel, known = _channels(channels, across)
    statistics += view * 4 * channels
    mean = tl.load(statistics + channel, known, 0.0)[None, :]
    scale = tl.load(statistics + 2 * channels + channel, known, 0.0)[None, :]
    offset = tl.load(statistics + 3 * channels + channel, known, 0.0)[None, :]
    total = tl.zeros((down, across), tl.float32)
    products = tl.zeros((down, across), tl.float32)
    for number in range(split, tl.cdiv(rows, down), splits):
        at, exists = _tile(number, channel, known, rows, channels, down)
        at += start
        value = tl.load(x + at, exists, 0.0).to(tl.float32)
        z = tl.load(dy + at, exists, 0.0).to(tl.float32)
        if adds:
            z += tl.load(other_dy + at, exists, 0.0).to(tl.float32)
        if gate == 1:
            z = tl.where(value * scale + offset > 0, z, 0.0)
        if gate == 2:
            z = tl.where(tl.load(y + at, exists, 0.0).to(tl.float32) > 0, z, 0.0)
        if keeps:
            tl.store(kept + at, z, exists)
        total += z
        products += z * (value - mean)
    out = partial + (view * splits + split) * 2 * channels + channel
    tl.store(out, tl.sum(total, 0), known)
    tl.store(out + channels, tl.sum(products, 0), known)


@triton.jit
def _finish_gradient_sums(partial, statistics, sums, rows, channels, splits, views, across: tl.constexpr):
    channel = tl.program_id(0) * across + tl.arange(0, across)
    known = channel < channels
    d_bias = tl.zeros((across,), tl.float32)
    d_weight = tl.zeros((across,), tl.float32)
    for view in range(views):
        total, products = _added(partial, view, channels, splits, channel, known, across)
        products *= tl.load(statistics + (view * 4 + 1) * channels + channel, known, 0.0)
        d_bias += total
        d_weight += products
        means = sums + (2 + 2 * view) * channels + channel
        tl.store(means, total / rows, known)
        tl.store(means + channels, products / rows, known)
    tl.store(sums + channel, d_bias, known)
    tl.store(sums + channels + channel, d_weight, known)


@triton.jit
def _gradient(
    dz, x, statistics, sums, dx, rows, channels, gates: tl.constexpr, down: tl.constexpr, across: tl.constexpr
):
    view, start = _view(rows, channels)
    channel, known = _channels(channels, across)
    at, exists = _tile(tl.program_id(0), channel, known, rows, channels, down)
    at += start
    statistics += view * 4 * channels
    sums += (2 + 2 * view) * channels
    mean = tl.load(statistics + channel, known, 0.0)[None, :]
    inverse = tl.load(statistics + channels + channel, known, 0.0)[None, :]
    scale = tl.load(statistics + 2 * channels + channel, known, 0.0)[None, :]
    mean_z = tl.load(sums + channel, known, 0.0)[None, :]
    mean_product = tl.load(sums + channels + channel, known, 0.0)[None, :]
    value = tl.load(x + at, exists, 0.0).to(tl.float32)
    z = tl.load(dz + at, exists, 0.0).to(tl.float32)
    if gates:
        offset = tl.load(statistics + 3 * channels + channel, known, 0.0)[None, :]
        z = tl.where(value * scale + offset > 0, z, 0.0)
    tl.store(dx + at, scale * (z - mean_z - (value - mean) * inverse * mean_product), exists)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        shape = (count, channels, (height + 1) // 2, (width + 1) // 2)
        y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        which = torch.empty_like(y, dtype=torch.uint8)
        rows, blocks, tile = _pool_plan(y)
        _pool[(triton.cdiv(rows, tile[0]), blocks)](x, y, which, rows, channels, height, width, *shape[2:], *tile)
        context.save_for_backward(which)
        context.shape = x.shape
        return y

    @staticmethod
    def backward(context: Any, dy: Tensor) -> Tensor:
        (which,) = context.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(context.shape, device=dy.device, dtype=dy.dtype, memory_format=torch.channels_last)
        _, channels, height, width = dx.shape
        rows, blocks, tile = _pool_plan(dx)
        _pool_gradient[(triton.cdiv(rows, tile[0]), blocks)](
            dy, which, dx, rows, channels, height, width, *dy.shape[2:], *tile
        )
        return dx


def _pool_plan(pixels: Tensor) -> tuple[int, int, tuple[int, int]]:
    channels = pixels.shape[1]
    across = min(64, triton.next_power_of_2(channels))
    return pixels.numel() // channels, triton.cdiv(channels, across), (TILE // 4 // across, across)


@triton.jit
def _pool(x, y, which, rows, channels, height, width, out_height, out_width, down: tl.constexpr, across: tl.constexpr):
    channel, known = _channels(channels, across)
    at, exists = _tile(tl.program_id(0), channel, known, rows, channels, down)
    row = tl.program_id(0) * down + tl.arange(0, down)
    top, left = row // out_width % out_height * 2 - 1, row % out_width * 2 - 1
    image = (row // (out_width * out_height)).to(tl.int64) * height
    best = tl.full((down, across), float("-inf"), tl.float32)
    winner = tl.zeros((down, across), tl.uint8)
    for tap in tl.static_range(9):
        h, w = top + tap // 3, left + tap % 3
        inside = ((h >= 0) & (h < height) & (w >= 0) & (w < width) & (row < rows))[:, None] & known[None, :]
        place = ((image + h) * width + w)[:, None] * channels + channel[None, :]
        value = tl.load(x + place, inside, float("-inf")).to(tl.float32)
        winner = tl.where(value > best, tap, winner).to(tl.uint8)
        best = tl.maximum(best, value)
    tl.store(y + at, best, exists)
    tl.store(which + at, winner, exists)


@triton.jit
def _pool_gradient(
    dy, which, dx, rows, channels, height, width, out_height, out_width, down: tl.constexpr, across: tl.constexpr
):
    """Each pixel gathers the gradient of the windows, at most four, in which it was the maximum."""
    channel, known = _channels(channels, across)
    at, exists = _tile(tl.program_id(0), channel, known, rows, channels, down)
    row = tl.program_id(0) * down + tl.arange(0, down)
    h, w = row // width % height, row % width
    image = (row // (width * height)).to(tl.int64) * out_height
    total = tl.zeros((down, across), tl.float32)
    for window in tl.static_range(4):
        out_h, out_w = (h + 1) // 2 - window // 2, (w + 1) // 2 - window % 2
        i, j = h - (2 * out_h - 1), w - (2 * out_w - 1)
        inside = (out_h >= 0) & (out_h < out_height) & (out_w >= 0) & (out_w < out_width) & (i < 3) & (j < 3)
        inside = (inside & (row < rows))[:, None] & known[None, :]
        place = ((image + out_h) * out_width + out_w)[:, None] * channels + channel[None, :]
        won = tl.load(which + place, inside, 255) == (i * 3 + j)[:, None]
        total += tl.where(won & inside, tl.load(dy + place, inside, 0.0).to(tl.float32), 0.0)
    tl.store(dx + at, total, exists)


def standardised(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`weight_standardisation.standardise`, in the dtype of the convolution."""
    kernel: Tensor = _Standardised.apply(weight, eps, dtype)
    return kernel


class _Standardised(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        result = torch.empty_like(weight, dtype=dtype)
        filters, size = len(weight), weight[0].numel()
        inverse = torch.empty(filters, device=weight.device, dtype=torch.float32)
        deviation = torch.empty_like(inverse)
        _standardise[(filters,)](weight, result, inverse, deviation, size, eps, triton.next_power_of_2(size))
        context.save_for_backward(weight, inverse, deviation)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, inverse, deviation = context.saved_tensors
        if gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        result = torch.empty_like(weight)
        size = weight[0].numel()
        _standardise_gradient[(len(weight),)](
            weight, gradient, inverse, deviation, result, size, triton.next_power_of_2(size)
        )
        return result, None, None


@triton.jit
def _standardise(weight, out, inverse, deviation, size, eps, block: tl.constexpr):
    """One filter: zero mean, unit standard deviation (unbiased)."""
    at, exists = tl.program_id(0) * size + tl.arange(0, block), tl.arange(0, block) < size
    value = tl.load(weight + at, exists, 0.0).to(tl.float32)
    centred = tl.where(exists, value - tl.sum(value, 0) / size, 0.0)
    spread = tl.sqrt(tl.sum(centred * centred, 0) / (size - 1))
    share = 1 / (spread + eps)
    tl.store(out + at, centred * share, exists)
    tl.store(inverse + tl.program_id(0), share)
    tl.store(deviation + tl.program_id(0), spread)


@triton.jit
def _standardise_gradient(weight, gradient, inverse, deviation, out, size, block: tl.constexpr):
    """r (g - mean(g)) - r^2 c sum(g c) / (s (n - 1)), c the centred filter, s its std, r = 1 / (s + eps)."""
    at, exists = tl.program_id(0) * size + tl.arange(0, block), tl.arange(0, block) < size
    value = tl.load(weight + at, exists, 0.0).to(tl.float32)
    g = tl.load(gradient + at, exists, 0.0).to(tl.float32)
    centred = tl.where(exists, value - tl.sum(value, 0) / size, 0.0)
    share, spread = tl.load(inverse + tl.program_id(0)), tl.load(deviation + tl.program_id(0))
    pull = tl.sum(g * centred, 0) * share * share / (tl.maximum(spread, 1e-30) * (size - 1))
    tl.store(out + at, share * (g - tl.sum(g, 0) / size) - centred * pull, exists)
