"""One process or many: the collective operations of the package.

Every function is the identity in a single process, so callers need not distinguish.
"""

import gc
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tico_ssl.runtime.launcher import launched, timeout_seconds
from tico_ssl.runtime.peers import Lost, Peers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# What gloo, NCCL and torch's store say of a process that has gone.
LOST_WORDS = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|timed out waiting", re.IGNORECASE)
GO_ON = "start again, pretraining with --resume, to go on from the last checkpoint"


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
    """Within, a process group, if a launcher started several processes: NCCL on GPUs, gloo on CPUs. Whoever waits for
    the others longer than TICO_TIMEOUT, or loses touch with them, ends with a line that names the missing ones."""
    if not launched() or dist.is_initialized():
        yield
        return
    from torch.distributed.distributed_c10d import PrefixStore  # torch may be built without them
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout_seconds())
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=limit)))
    except RuntimeError as error:
        raise Lost(f"the processes did not meet within {limit.total_seconds():g} s ({_line(error)})") from error
    store.set_timeout(limit)
    with Peers(PrefixStore("peers", store.clone()), rank, world) as peers:
        try:
            with _group(device, store, rank, world, limit):
                yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not LOST_WORDS.search(str(error)):
                raise
            who, why = f"process {rank} (host {socket.gethostname()})", _line(error)
            words = f"{who} lost touch with the others: {peers.missed()} ({why})"
            raise Lost(f"{words}; {GO_ON}") from error


@contextmanager
def _group(device: torch.device, store: "Store", rank: int, world: int, limit: timedelta) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()  # modules in cycles of references hold the group, whose threads must not outlive Python


def _line(error: Exception) -> str:
    """The first sentence of an error of torch, without the place in its source."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] *", "", line).partition(". ")[0]


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
