"""One process or many: the collective operations of the package.

Every function is the identity in a single process, so callers need not distinguish.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tico_ssl.runtime.launcher import launched


def active() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """The rank of this process, 0 for a single one."""
    return dist.get_rank() if active() else 0


def world_size() -> int:
    """The number of processes that share the batch."""
    return dist.get_world_size() if active() else 1


def is_main() -> bool:
    """Whether this process writes files and talks to the user."""
    return rank() == 0


@contextmanager
def session(device: torch.device) -> Iterator[None]:
    """Within, a process group, if a launcher started several processes: NCCL on GPUs, gloo on CPUs."""
    if not launched() or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timedelta(minutes=30), device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_mean(tensor: Tensor) -> Tensor:
    """The mean over processes. Not differentiable: pass detached values."""
    if not active():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / world_size()


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Every process's loss depends on every process's summand, so gradients are summed as well.
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over processes, with its gradient."""
    return _AllSum.apply(tensor) if active() else tensor


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # Every process's loss depends on these rows; DistributedDataParallel takes the mean over processes afterwards.
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total.chunk(world_size())[rank()]


def gathered(tensor: Tensor) -> Tensor:
    """The rows of all processes in the order of their ranks (all-gather), with their gradient."""
    return _Gathered.apply(tensor) if active() else tensor


def barrier() -> None:
    """Wait for the other processes."""
    if active():
        dist.barrier()


def all_max(numbers: Sequence[float]) -> list[float]:
    """The largest over processes of each number. Synchronises with the device."""
    if not active():
        return list(numbers)
    largest = torch.tensor(numbers, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
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
