"""What every loss does with raw embeddings first: look at their shapes, lift them to float32, give them length one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def check_embeddings(name: str, z_1: Tensor, z_2: Tensor, least: int = 2) -> None:
    """Two matrices (n, d) of one shape, with so many images at least."""
    if z_1.ndim != 2 or z_1.shape != z_2.shape:
        raise ValueError(
            f"{name}: the embeddings of two views must both be (batch, dim), "
            f"got {tuple(z_1.shape)} and {tuple(z_2.shape)}"
        )
    if len(z_1) < least:
        raise ValueError(f"{name}: a batch needs at least two images, got {len(z_1)}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 or better, whatever autocast made of it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def unit(embeddings: Tensor) -> Tensor:
    """Rows of length one, in float32 at least."""
    return F.normalize(at_least_float32(embeddings), dim=1)
