"""Which device, and which precision on it."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tico_ssl.runtime.errors import UserError

THREADS = 4  # of a process that computes on a GPU: more are not faster, and spin on the cores that others need
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def choose_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU. TICO_DEVICE overrides."""
    if name := os.environ.get("TICO_DEVICE"):
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"TICO_DEVICE={name}: {str(error).splitlines()[0]}") from error
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # schedulers may show each its own only
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def tune_process(device: torch.device) -> None:
    """Tune this process for speed. Public functions call it first; importing the package changes nothing."""
    if device.type == "cpu":
        keep_freed_memory()
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), THREADS))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within, an operator of torch uses one thread: faster for single small images, of which several threads take one
    each, and much faster where others use the cores too, since threads of one operator wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of returning them to the system, which would zero every page again.
    On two cores this makes views of 32 pixels 1.4 times as fast. Without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(M_MMAP_THRESHOLD, 2**30)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products."""
    if precision == "auto":
        return torch.bfloat16 if has_bf16(device) else torch.float32
    if precision == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise UserError("training.precision bf16: this GPU does not support it; use fp32 or auto")
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 faster than float32 (on a CPU: 1.5 times for the demo's step)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Mixed precision for bf16, nothing otherwise."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. To a GPU it is asynchronous, from pinned memory: otherwise the host would wait for the
    stream. From one it is waited for: the host would read pixels that are not there yet."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")
