"""What a run remembers of its images, so that it is not resumed with others; and several processes tell each other, so
that they do not work on different ones.

Digests of whole data sets would take as long as reading them, so this is a glance: the number of images, some of their
names, all labels, and the bytes of a few images, or of all that are in memory anyway. It finds data that were
exchanged, reordered, relabelled or rewritten; a flipped bit in one of a million files it finds by chance only. A packed
file has a checksum of every image, which is verified when the image is used.
"""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source, evenly_spaced
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.wording import counted

SOME_NAMES, FEW_IMAGES = 1_000, 64
PIECE = 1_024  # images whose checksum is computed at once

Glance = dict[str, int | None]


def glance(source: Source) -> Glance:
    """Numbers that differ, very likely, if the images or their labels do. None: cannot be known."""
    return {
        "images": len(source),
        "names": _of_names(source),
        "labels": None if source.labels is None else crc32(np.ascontiguousarray(source.labels.numpy()).data),
        "content": _of_content(source),
    }


def require_same_images(source: Source, file: Path) -> None:
    """Write the numbers of a new run's images to a file; refuse to resume a run with images that have others."""
    if not file.is_file():
        write_atomically(file, json.dumps(glance(source)) + "\n")
        return
    if changed := changed_images(source, file):
        raise UserError(
            f"{source.name}: not the images that the run began with ({', '.join(changed)} changed): restore them, "
            f"or start a new run; to resume nevertheless, remove {file}"
        )


def changed_images(source: Source, file: Path) -> list[str]:
    """Which numbers of a run's images these images do not have."""
    now = glance(source)
    try:
        return _changed(now, json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged; remove it to go on with the images as they are now") from error


def _changed(one: Glance, other: Glance) -> list[str]:
    """The numbers that differ, of those that both have."""
    return [key for key, value in one.items() if None not in (value, other[key]) and value != other[key]]


def require_same_everywhere(sources: Sequence[Source]) -> None:
    """Refuse processes that see different images in one place: each takes its share of them by number."""
    if not distributed.active():
        return
    every = distributed.everyone((socket.gethostname(), [glance(source) for source in sources]))
    first, expected = every[0]
    for rank, (host, found) in enumerate(every):
        if (difference := _difference(expected, found)) is not None:
            raise UserError(
                f"{sources[0].name}: process {rank} (host {host}) does not have the images of process 0 "
                f"(host {first}): {difference}; give all hosts the same"
            )


def _difference(expected: Sequence[Glance], found: Sequence[Glance]) -> str | None:
    """In what images differ, in words; None if they do not."""
    if len(expected) != len(found):
        return f"{counted(len(found), 'split')} instead of {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if one["images"] != other["images"]:
            return f"{counted(other['images'] or 0, 'image')} instead of {one['images']:,}"
        if changed := _changed(one, other):
            return f"other {', '.join(changed)}"
    return None


def _some(source: Source, most: int) -> Source:
    return source.subset(evenly_spaced(len(source), most))


def _of_names(source: Source) -> int:
    chosen = _some(source, SOME_NAMES)
    return crc32("\0".join(chosen.names(i) for i in range(len(chosen))).encode(errors="surrogatepass"))


def _of_content(source: Source) -> int | None:
    found = 0
    if source.images is not None and not source.mapped:
        for places in torch.arange(len(source)).split(PIECE):
            found = crc32(source.take(places).contiguous().numpy().data, found)
        return found
    chosen = _some(source, FEW_IMAGES)
    for i in chosen.places():
        if source.images is not None:
            found = crc32(chosen.fetch(i).contiguous().numpy().data, found)
        elif chosen.content is not None:
            try:
                found = crc32(chosen.content(i), found)
            except BadImage:
                found = crc32(b"unreadable", found)
        else:
            return None
    return found
