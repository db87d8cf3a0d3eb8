"""Common to all losses: check the shapes of raw embeddings, convert to float32, normalise."""

import torch
import torch.nn.functional as F
from torch import Tensor


def check_embeddings(name: str, z_1: Tensor, z_2: Tensor, least: int = 2) -> None:
    """Refuse anything but two matrices (n, d) of one shape with at least `least` rows."""
    if z_1.ndim != 2 or z_1.shape != z_2.shape:
        raise ValueError(
            f"{name}: the embeddings of two views must both be (batch, dim), "
            f"got {tuple(z_1.shape)} and {tuple(z_2.shape)}"
        )
    if len(z_1) < least:
        raise ValueError(f"{name}: a batch needs at least two images, got {len(z_1)}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 or better, regardless of autocast."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def unit(embeddings: Tensor) -> Tensor:
    """L2-normalised rows, at least in float32."""
    return F.normalize(at_least_float32(embeddings), dim=1)
