"""Which device, and which precision on it."""

import os
from contextlib import AbstractContextManager

import torch

from tico_ssl.errors import UserError


def choose_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU. TICO_DEVICE overrides."""
    if name := os.environ.get("TICO_DEVICE"):
        return torch.device(name)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """The type that matrix products run in."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("training.precision bf16: this GPU has none; use fp32 or auto")
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]


def autocast(device: torch.device, dtype: torch.dtype | None = None) -> AbstractContextManager[None]:
    """Mixed precision where it was asked for; without a type, what 'auto' means on this device."""
    dtype = dtype if dtype is not None else resolve_precision("auto", device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
