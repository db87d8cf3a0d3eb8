"""One process or many: the collective operations of the package.

Every function is the identity in a single process, so callers need not distinguish.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 2**25  # bytes of gradients in one collective operation, and so of memory for it
LOSS, GRADIENTS, STATISTICS = "loss and its state", "gradients", "BatchNorm"  # purposes of collective operations
ROWS = 2**13  # rows of every process in one collective operation


class Sent(NamedTuple):
    """A collective operation of a step: a sum, or a gather or scatter in which every process has a share, and the bytes
    of the sum or of a share; and what it is for."""

    kind: Literal["sum", "gather", "scatter"]
    bytes: int
    purpose: str


class _Pretence(NamedTuple):
    """A process that stands for several."""

    world: int
    sent: list[Sent]


_pretence: _Pretence | None = None


@contextmanager
def pretended(world: int) -> Iterator[list[Sent]]:
    """Within, this process stands for several that are all alike: nothing is sent, and what would be is listed."""
    global _pretence
    _pretence = _Pretence(world, [])
    try:
        yield _pretence.sent
    finally:
        _pretence = None


def active() -> bool:
    """Whether there are several processes."""
    return _pretence is not None or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """The rank of this process, 0 for a single one."""
    return dist.get_rank() if active() and _pretence is None else 0


def world_size() -> int:
    """The number of processes that share the batch."""
    if _pretence is not None:
        return _pretence.world
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """Whether this process writes files and talks to the user."""
    return rank() == 0


def all_mean(tensor: Tensor) -> Tensor:
    """The mean over processes. Not differentiable: pass detached values."""
    if not active():
        return tensor
    return add_up(tensor.clone()) / world_size()


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return add_up(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Every process's loss depends on every process's summand, so gradients are summed as well.
        return add_up(gradients[0].clone())


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over processes, with its gradient."""
    return _AllSum.apply(tensor) if active() else tensor


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return stacked(tensor).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Every process's loss depends on these rows; `average_gradients` takes the mean over processes afterwards.
        return _own_part_of_sum(gradients[0].contiguous())


def gathered(tensor: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks (all-gather), with their gradient."""
    return _Gathered.apply(tensor) if active() else tensor


def stacked(tensor: Tensor, purpose: str = LOSS) -> Tensor:
    """The tensors of all processes, of one shape, in the order of their ranks. Not differentiable."""
    if not active():
        return tensor[None]
    if _pretence is not None:
        _pretence.sent.append(Sent("gather", tensor.nbytes, purpose))
        return torch.stack([tensor] * _pretence.world)
    every = tensor.new_empty((world_size(), *tensor.shape))
    _gather()(every.view(-1), tensor.reshape(-1))
    return every


def _own_part_of_sum(rows: Tensor) -> Tensor:
    """Of the sum over processes, the rows of this one: each has an equal part of them."""
    own = rows.chunk(world_size())[rank()]
    if _pretence is not None:
        _pretence.sent.append(Sent("scatter", own.nbytes, LOSS))
        return own * _pretence.world
    total = torch.empty_like(own)
    _scatter()(total.view(-1), rows.view(-1))
    return total


def _gather() -> Callable[..., Any]:
    """Of one tensor, without copies of parts; named otherwise before torch 2.14."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def add_up(tensor: Tensor, purpose: str = LOSS) -> Tensor:
    """The sum over processes, in place. Not differentiable."""
    if _pretence is not None:
        _pretence.sent.append(Sent("sum", tensor.nbytes, purpose))
        return tensor.mul_(_pretence.world)
    if active():
        dist.all_reduce(tensor)
    return tensor


def rows_of_all(rows: Tensor) -> Tensor:
    """The rows of all processes, any number of each, in the order of their ranks, on the CPU. Synchronises."""
    if not active():
        return rows.cpu()
    counts: list[int] = everyone(len(rows))
    found: list[list[Tensor]] = [[] for _ in counts]
    for begin in range(0, max(counts), ROWS):
        most = min(ROWS, max(counts) - begin)
        chunk = torch.zeros(most, *rows.shape[1:], dtype=rows.dtype, device=_device())
        mine = rows[begin : begin + most]
        chunk[: len(mine)] = mine
        for count, kept, part in zip(counts, found, stacked(chunk).cpu(), strict=True):
            kept.append(part[: max(0, count - begin)].clone())
    return torch.cat([part for kept in found for part in kept] or [rows.cpu()])


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over processes.

    Gradients travel in flat buckets, from the last parameter to the first, which a backward pass reaches last. They
    keep their memory, and nothing here waits for the device: a captured step records all of it.
    """
    if not active():
        return
    whole = [p.grad for p in reversed(list(parameters)) if p.grad is not None and not is_share(p)]
    for bucket in _buckets(whole):  # the gradients of shares are means already
        flat = add_up(torch.cat(bucket), GRADIENTS).div_(world_size())
        torch._foreach_copy_(bucket, list(flat.split([len(part) for part in bucket])))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The values of gradients in the order of their memory, in groups of at least BUCKET bytes but for the last."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        bucket.append(_in_memory_order(gradient))
        if sum(part.nbytes for part in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _in_memory_order(tensor: Tensor) -> Tensor:
    """All values as one axis, without a copy: autograd gives gradients the strides of their parameters, which are the
    same in every process, and leaves no gaps."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent != tensor.numel():
        raise ValueError(f"a gradient of shape {tuple(tensor.shape)} has gaps in memory: {tensor.stride()}")
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def spread(module: nn.Module) -> None:
    """Give every process the parameters and buffers of the main one."""
    for tensor in (*module.parameters(), *module.buffers()) if active() else ():
        if not is_share(tensor):
            dist.broadcast(tensor, 0)


def is_share(tensor: Any) -> bool:
    """Whether a tensor is divided among processes."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Of a tensor that is divided among processes, the share of this one; another as it is. Not differentiable."""
    return cast(Any, tensor).to_local() if is_share(tensor) else tensor


def barrier() -> None:
    """Wait for the other processes."""
    if active():
        dist.barrier()


def all_max(numbers: Sequence[float]) -> list[float]:
    """The largest over processes of each number. Synchronises with the device."""
    if not active():
        return list(numbers)
    largest = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def anyone(flag: bool) -> bool:
    """Whether the flag is true in any process."""
    return all_max([float(flag)])[0] > 0


def everyone(value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks."""
    if not active():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def _device() -> str:
    """Where tensors must lie that are sent."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
