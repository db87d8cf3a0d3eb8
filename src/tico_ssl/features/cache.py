"""Features on disk, so that a second protocol or a second command does not extract them again.

A file's name is a digest of everything that determines its content: weights, images, preprocessing, device type.
So a file is never stale and may be deleted at any time; a damaged one is computed again.
"""

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.extraction import Extracted, extract, needed_side
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.progress import say

VERSION = 2  # of the file's content: raise it when the same key would mean different values


def weights_digest(backbone: Backbone) -> str:
    """Digest of a backbone's parameters, buffers and description."""
    text = json.dumps([backbone.config.model_dump(mode="json"), backbone.image_size, backbone.mean, backbone.std])
    found = hashlib.sha256(text.encode())
    for name, value in backbone.state_dict().items():
        found.update(name.encode())
        found.update(_bytes(value))
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class FeatureCache:
    """Extracts features, or reads them from a folder. Without a folder it always extracts."""

    folder: Path | None
    reduced_decoding: bool = True
    """Whether large JPEGs are decoded at a fraction of their size."""

    def extract(
        self, backbone: Backbone, source: Source, device: torch.device, label: str | None = None, whole: bool = False
    ) -> Extracted:
        """The features of a source, as `features.extract` makes them."""
        file = self._file(backbone, source, device, whole)
        if file is not None and (kept := _read(file)) is not None:
            return kept
        made = extract(backbone, source, device, label, whole)
        if file is not None and distributed.is_main():
            _write(file, made)
        return made

    def _file(self, backbone: Backbone, source: Source, device: torch.device, whole: bool) -> Path | None:
        if self.folder is None or (images := source.fingerprint()) is None:
            return None
        seen = {"whole": whole, "shorter": needed_side(backbone) if self.reduced_decoding else None}
        computed = {"device": device.type, "precision": "float32"}
        key = json.dumps([VERSION, weights_digest(backbone), images, seen, computed], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"


def _read(file: Path) -> Extracted | None:
    """The content of a file, or None if it is incomplete or damaged."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            checksum = (opened.metadata() or {}).get("checksum")
            kept: Extracted | None = Extracted(opened.get_tensor("features"), opened.get_tensor("places"))
    except (SafetensorError, OSError):
        kept, checksum = None, None
    if kept is None or checksum != _checksum(kept):
        say(f"{file}: damaged, so its features are extracted again")
        return None
    return kept


def _write(file: Path, made: Extracted) -> None:
    """Atomic. A folder that cannot be written to costs time, not the result."""
    tensors = {"features": made.features.contiguous(), "places": made.places.contiguous()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask has it; safetensors replaces the file by a private one
            save_file(tensors, temporary, metadata={"checksum": _checksum(made)})
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        say(f"features are not cached: {refusal(error) or error}")


def _checksum(made: Extracted) -> str:
    content = zlib.crc32(_bytes(made.places), zlib.crc32(_bytes(made.features)))
    return " ".join(map(str, [content, *((tensor.dtype, tuple(tensor.shape)) for tensor in made)]))


def _bytes(tensor: Tensor) -> Any:
    """A view of the memory that can be hashed without a copy."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
