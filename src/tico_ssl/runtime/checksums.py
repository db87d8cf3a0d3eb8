"""Checksums of nested values with tensors in them: a manifest that tells of any bit that has changed on the disk."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

REST = "everything but the tensors"


def checksums(values: Any) -> dict[str, str]:
    """A checksum of every tensor, by its path, and one of all the rest: names, shapes, types and numbers."""
    tensors: dict[str, Tensor] = {}
    outline = _outline(values, "", tensors)
    found = {path: _short(_bytes(tensor)) for path, tensor in tensors.items()}
    return found | {REST: _short(json.dumps(outline, sort_keys=True).encode())}


def damage(values: Any, manifest: dict[str, str]) -> str | None:
    """What differs from a manifest, in words, if anything."""
    found = checksums(values)
    wrong = [path for path in {**found, **manifest} if found.get(path) != manifest.get(path)]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"the checksum of {wrong[0]} is wrong{more}" if wrong else None


def _outline(values: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The values as JSON, with type and shape in place of a tensor; tensors are collected by their paths."""
    if isinstance(values, dict):
        return {str(key): _outline(value, f"{path}.{key}".lstrip("."), tensors) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_outline(value, f"{path}.{number}", tensors) for number, value in enumerate(values)]
    if isinstance(values, Tensor):
        tensors[path] = values
        return [str(values.dtype), list(values.shape)]
    return values


def _short(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    """A view of the memory that can be hashed without a copy."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
