"""Features on disk, so that a second protocol or a second command does not extract them again.

A file's name is a digest of everything that determines its content: weights or how they are made, images,
preprocessing, device type and precision. So a file is never stale and may be deleted at any time; a damaged one is
computed again, and so is one that lacks an image which can be read by now.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.features.extraction import Extracted, extract_all, left_out, needed_side
from tico_ssl.features.lazy import LazyBackbone, memory_of, ready
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.files import remove_old_temporaries, written_atomically
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import say

VERSION = 3  # of the file's content: raise it when the same key would mean different values


@dataclass(frozen=True)
class FeatureCache:
    """Extracts features, or reads them from a folder. Without a folder it always extracts."""

    folder: Path | None
    reduced_decoding: bool = True
    """Whether large JPEGs are decoded at a fraction of their size."""
    dtype: torch.dtype = torch.float32
    """Of matrix products: float32 or bf16."""
    together: bool = False
    """Whether all processes ask for the same features, so that each may extract a share."""

    def extract(
        self,
        backbone: Backbone | LazyBackbone,
        source: Source,
        device: torch.device,
        label: str | None = None,
        whole: bool = False,
    ) -> Extracted:
        """The features of a source, as `features.extract` makes them."""
        return self.extract_all([backbone], source, device, label, whole)[0]

    def extract_all(
        self,
        backbones: Sequence[Backbone | LazyBackbone],
        source: Source,
        device: torch.device,
        label: str | None = None,
        whole: bool = False,
    ) -> list[Extracted]:
        """The same for several backbones: those whose features are not known, in one pass over the images. Only they
        are built."""
        given = [ready(backbone) for backbone in backbones]
        files = self._files(given, source, device, whole)
        found = [None if file is None else _still_whole(_read(file), source) for file in files]
        if missing := self._missing(found):
            networks = [given[number].built for number in missing]
            made = extract_all(networks, source, device, label, whole, self.dtype, self.together)
            for number, one in zip(missing, made, strict=True):
                found[number] = one
                if (file := files[number]) is not None and distributed.is_main():
                    _write(file, one)
        return [one for one in found if one is not None]

    def _missing(self, found: Sequence[Extracted | None]) -> list[int]:
        """The numbers of those that are not known, to any of the processes if they extract together: the main one may
        write a file just before another one looks for it."""
        lacking = [float(known is None) for known in found]
        return [number for number, yes in enumerate(distributed.all_max(lacking) if self.together else lacking) if yes]

    def _files(
        self, backbones: Sequence[LazyBackbone], source: Source, device: torch.device, whole: bool
    ) -> list[Path | None]:
        if self.folder is None or (images := source.fingerprint()) is None:
            return [None] * len(backbones)
        return [self._file(backbone, images, device, whole) for backbone in backbones]

    def _file(self, backbone: LazyBackbone, images: str, device: torch.device, whole: bool) -> Path | None:
        if self.folder is None or (identity := backbone.identity) is None:
            return None
        seen = {"whole": whole, "shorter": needed_side(backbone.like) if self.reduced_decoding else None}
        computed = {"device": device.type, "precision": str(self.dtype).removeprefix("torch.")}
        key = json.dumps([VERSION, identity, images, seen, computed], sort_keys=True)
        return (backbone.folder or self.folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"


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


def _still_whole(kept: Extracted | None, source: Source) -> Extracted | None:
    """Features from a file, unless an image that they lack can be read by now: what kept it from that, such as a
    network drive or a package that was missing, has passed."""
    for place in [] if kept is None else left_out(source, kept.places):
        try:
            source.fetch(place)
        except BadImage:
            continue
        say(f"{printable(source.names(place))} can be read now, so features are extracted again")
        return None
    return kept


def _write(file: Path, made: Extracted) -> None:
    """Atomic. A folder that cannot be written to costs time, not the result."""
    tensors = {"features": made.features.contiguous(), "places": made.places.contiguous()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_old_temporaries(file.parent)
        with written_atomically(file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask has it; safetensors replaces the file by a private one
            save_file(tensors, temporary, metadata={"checksum": _checksum(made)})
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        say(f"features are not cached: {refusal(error) or error}")


def _checksum(made: Extracted) -> str:
    content = zlib.crc32(memory_of(made.places), zlib.crc32(memory_of(made.features)))
    return " ".join(map(str, [content, *((tensor.dtype, tuple(tensor.shape)) for tensor in made)]))
