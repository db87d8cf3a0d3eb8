"""A training batch on disk, with its views: a safetensors file."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically
from tico_ssl.views.executor import Views


def save_batch(path: Path, step: int, raw: RawBatch, views: Views) -> None:
    """Write the batch of a step: `index` of the images, `label`, `decisions` of the view operations, `pixels` (or a
    crop of each view, `pixels.0`, ...) and the views made of them, `view.0`, ..."""
    tensors = {"index": raw.index, "decisions": raw.decisions} | _numbered(
        "view", views.make(raw.pixels, raw.decisions)
    )
    tensors |= {"pixels": raw.pixels} if isinstance(raw.pixels, Tensor) else _numbered("pixels", raw.pixels)
    tensors |= {} if raw.label is None else {"label": raw.label}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path, alone=True) as temporary:
        alone = {name: _alone(value) for name, value in tensors.items()}
        temporary.write_bytes(save(alone, metadata={"step": str(step)}))


def load_batch(path: Path, device: torch.device) -> RawBatch:
    """The batch of a file, on a device; its views are made again from pixels and decisions."""
    try:
        tensors = load_file(path, str(device))
        crops = tuple(tensors[name] for name in sorted(tensors) if name.startswith("pixels."))
        return RawBatch(crops or tensors["pixels"], tensors["decisions"], tensors["index"], tensors.get("label"))
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _alone(tensor: Tensor) -> Tensor:
    """A copy on the CPU, as crops may share the memory of a ring."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _numbered(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"{name}.{number:02}": tensor for number, tensor in enumerate(tensors)}
