"""The process group of a launch: processes that find each other, and say which of them is missing."""

import gc
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tico_ssl.runtime.launcher import launched, timeout_seconds
from tico_ssl.runtime.peers import Lost, Peers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# What gloo, NCCL and torch's store say of a process that has gone.
LOST_WORDS = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|timed out waiting", re.IGNORECASE)
GO_ON = "start again, pretraining with --resume, to go on from the last checkpoint"


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
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
            with _joined(device, store, rank, world, limit):
                yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not LOST_WORDS.search(str(error)):
                raise
            who, why = f"process {rank} (host {socket.gethostname()})", _line(error)
            words = f"{who} lost touch with the others: {peers.missed()} ({why})"
            raise Lost(f"{words}; {GO_ON}") from error


@contextmanager
def _joined(device: torch.device, store: "Store", rank: int, world: int, limit: timedelta) -> Iterator[None]:
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
