"""Writing a packed file: images of any source, encoded in parallel; an interrupted call can be resumed."""

import io
import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tico_ssl.data.bad_files import in_order
from tico_ssl.data.decoding import BadImage, open_file, picture_size
from tico_ssl.data.formats.packed import MAGIC, PAGE, PLAIN, PREAMBLE, SPLIT, SUFFIX, first_page, refusing, require
from tico_ssl.data.source import Reduced, Source, spread_evenly
from tico_ssl.data.splits import Part, together
from tico_ssl.runtime.device import one_thread
from tico_ssl.runtime.locks import locked
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.wording import counted
from tico_ssl.views import operations

SAMPLE = 32  # images whose size is looked at
Encoded = tuple[int, bytes, str]  # channels, content, and the error if there is no content


@dataclass(frozen=True)
class PackReport:
    """Summary of packing. `resumed_from` is the number of images that an interrupted call had processed."""

    images: int
    bad: list[tuple[str, str]]
    bytes: int
    seconds: float
    resumed_from: int
    sides: Reduced
    """Shorter sides of the images: packed, and before."""


def pack(
    source: Source,
    out: Path,
    size: int,
    jpeg: bool = False,
    quality: int = 90,
    workers: int = 2,
    label: str | None = None,
    splits: Mapping[str, int] | None = None,
) -> PackReport:
    """Write the images of a source to one file. The next call continues the work of an interrupted one. `splits` is the
    number of images in each folder of a split, one after the other."""
    started = time.monotonic()
    require(out.suffix == SUFFIX, f"{out}: the name of a packed file ends in {SUFFIX}")
    _require_new(out)
    right = size >= 1 and workers >= 1 and 1 <= quality <= 100
    require(right, f"size {size}, workers {workers}, quality {quality}: at least 1, and quality at most 100")
    names = [os.fsencode(source.names(i)) for i in range(len(source))]
    settings = (f"jpeg {size} {quality}" if jpeg else f"fixed {size}") + (f" {dict(splits)}" if splits else "")
    fingerprint = _fingerprint(source, names, settings)
    encode = (lambda image: _small_jpeg(image, size, quality)) if jpeg else (lambda image: _square(image, size))
    with refusing(out, "written"), closing(Unfinished(out, fingerprint, label)) as work:
        _require_new(out)  # again: another command may have ended since
        places = range(work.done, len(source))
        for result in track(_encoded(source, encode, places, workers), len(places), label):
            work.append(*result)
        folders = [f"{folder}/" for folder, count in (splits or {}).items() for _ in range(count)]
        bad = [((folders[i] if folders else "") + os.fsdecode(names[i]), reason) for i, reason in work.bad]
        example = f", such as {printable(bad[0][0])} ({bad[0][1]})" if bad else ""
        require(
            len(bad) < len(source), f"{source.name}: none of {counted(len(source), 'image')} can be packed{example}"
        )
        shorter = original_side(source)
        written = work.finish(source, names, size, "jpeg" if jpeg else "fixed", splits, shorter)
    sides, seconds = Reduced(size, shorter), time.monotonic() - started
    return PackReport(len(source) - len(bad), bad, written, seconds, places.start, sides)


def _require_new(out: Path) -> None:
    require(not out.exists(), f"{out} exists: remove it, or choose another name")


def pack_splits(
    parts: Sequence[Part], out: Path, size: int, jpeg: bool = False, workers: int = 2, label: str | None = None
) -> PackReport:
    """Write the images of all splits to one file that keeps them apart; one split alone is a file without splits."""
    splits = {part.folder or part.split: len(part.source) for part in parts} if len(parts) > 1 else None
    return pack(together(parts, with_folders=False), out, size, jpeg, workers=workers, label=label, splits=splits)


def _fingerprint(source: Source, names: list[bytes], settings: str) -> bytes:
    """What must be equal to continue interrupted work. A few images distinguish sources that only number theirs."""
    digest = sha256(ascii((len(source), source.name, settings)).encode() + b"\0".join(names))
    places = [0, len(source) // 2, len(source) - 1] if names else []
    for channels, pixels, _ in _encoded(source, lambda image: image.contiguous().numpy().tobytes(), places, 1):
        fits = settings.startswith("fixed") or channels in (0, 1, 3)
        require(fits, f"{source.name}: {channels} channels do not fit a JPEG, which has 1 or 3; pack without --jpeg")
        digest.update(pixels)
    return digest.hexdigest().encode()


def _encoded(source: Source, encode: Callable[[Tensor], bytes], at: Iterable[int], workers: int) -> Iterator[Encoded]:
    """Channels and bytes of every image in order, or its error."""

    def work(place: int) -> Encoded:
        try:
            image = source.fetch(place)
            if image.dtype != torch.uint8 or image.ndim != 3 or not image.numel():
                return 0, b"", f"{image.dtype} {tuple(image.shape)}, not uint8 (C, H, W)"
            return len(image), encode(image), ""
        except (BadImage, OSError) as error:
            return 0, b"", error.reason if isinstance(error, BadImage) else str(error)

    with one_thread(), ThreadPoolExecutor(workers) as pool:  # sums must not depend on the number of cores either
        yield from in_order(pool, work, at, 4 * workers)


def _square(image: Tensor, size: int) -> bytes:
    """The central square of the shorter side, resized."""
    height, width = image.shape[1:]
    side = min(height, width)
    square = image[:, (height - side) // 2 :, (width - side) // 2 :][:, :side, :side]
    if side != size:
        zero, extent = torch.zeros(1), torch.full((1,), side)
        resized = operations.resized_crop(square[None], zero, zero, extent, extent, zero, size)[0]
        square = resized.mul_(255).round_().to(torch.uint8)
    return square.contiguous().numpy().tobytes()


def _small_jpeg(image: Tensor, size: int, quality: int) -> bytes:
    """A JPEG with at most `size` pixels along its shorter side."""
    channels, height, width = image.shape
    pixels, scale, stream = image.permute(1, 2, 0).contiguous().numpy(), size / min(height, width), io.BytesIO()
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if scale < 1:
        picture = picture.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def original_side(source: Source) -> int:
    """The median of the shorter sides that the images have, or had before they were packed, in pixels, of a few of
    them; 0 where none can be read."""
    if source.reduced is not None:
        return source.reduced.original
    sides = _stored_sides(source)
    return int(np.median(sides)) if sides else 0


def largest_side(source: Source) -> int:
    """The longest of the shorter sides of a few images, beyond which packing enlarges; 0 where none can be read."""
    return max(_stored_sides(source), default=0)


def _stored_sides(source: Source) -> list[int]:
    places = spread_evenly(len(source), SAMPLE).tolist()
    return [side for place in places if (side := _stored_side(source, place)) is not None]


def _stored_side(source: Source, place: int) -> int | None:
    """The shorter side of an image: of a file by its header, since large JPEGs are decoded at a fraction of their
    size."""
    with suppress(Exception):  # decoders fail in many ways; then the pixels tell
        if source.files is not None:
            with open_file(source.files(place), source.names(place)) as file:
                return min(picture_size(file))
        if source.content is not None:
            return min(picture_size(io.BytesIO(source.content(place))))
    with suppress(OSError, ValueError):
        return min(source.fetch(place).shape[1:])
    return None


def _bounds(sizes: Iterable[int]) -> bytes:
    """Start offsets of consecutive pieces, and the end of the last one."""
    return np.cumsum([0, *sizes], dtype="<i8").tobytes()


def _left(splits: Mapping[str, int], places: np.ndarray) -> dict[str, int]:
    """The number of images in each split that were packed; one without any is left out."""
    counts = np.diff(np.searchsorted(places, np.cumsum([0, *splits.values()]))).tolist()
    return {folder: count for folder, count in zip(splits, counts, strict=True) if count}


class Unfinished:
    """A file being written, and a journal: a fingerprint of the work, then a line per written image, [channels, size,
    checksum, error]. Work continues after the last line that matches the bytes, whatever a killed process left."""

    def __init__(self, out: Path, fingerprint: bytes, label: str | None = None) -> None:
        self.out, self.done, self.channels = out, 0, 0
        self.kept = array("q")  # offset, size and checksum of each image, in a flat array
        self.bad: list[tuple[int, str]] = []
        out.parent.mkdir(parents=True, exist_ok=True)
        self.paths = [out.with_name(out.name + end) for end in (".partial", ".journal")]
        self.journal = self.paths[1].open("a+b")
        self._require_alone()  # before there is anything that another command could take for its own
        self.data = self.paths[0].open("a+b")
        self.files = self.data, self.journal
        self._continue(fingerprint + b"\n", label and f"{label}: existing images")

    def _require_alone(self) -> None:
        """Two commands that wrote one file would both append to it. The other may also have ended just now, and have
        taken its journal away."""
        alone = locked(self.journal) and self._is_there(self.journal)
        if not alone:
            self.journal.close()
        require(alone, f"{self.out}: another command is writing it: wait for its end, or choose another name")

    def _is_there(self, journal: BinaryIO) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(journal.fileno()), self.paths[1].stat())
        return False

    def _continue(self, fingerprint: bytes, label: str | None) -> None:
        size, length = self.data.seek(0), self.journal.seek(0)
        if len(self.data.read(PAGE)) == PAGE and self.journal.readline() == fingerprint:
            size, length = PAGE, len(fingerprint)
            lines = self.journal.read().split(b"\n")[:-1]  # the last one is empty or cut off
            with suppress(ValueError):  # a line that is not JSON: a power failure
                for record in track(map(json.loads, lines), len(lines), label):
                    content = self.data.read(record[1])
                    if [len(content), crc32(content)] != record[1:3]:
                        break
                    self._count(*record)
                    size, length = size + len(content), length + len(lines[self.done - 1]) + 1
        for file, whole, start in ((self.data, size, bytes(PAGE)), (self.journal, length, fingerprint)):
            file.truncate(whole)
            file.write(b"" if whole else start)

    def append(self, channels: int, content: bytes, reason: str) -> None:
        """Write the next image, or record its error."""
        if content and self.channels not in (0, channels):
            content, reason = b"", f"{channels} channels, unlike the images before, which have {self.channels}"
        record = (channels, len(content), crc32(content), reason)
        for file, text in ((self.data, content), (self.journal, json.dumps(record).encode() + b"\n")):
            file.write(text)
            file.flush()
        self._count(*record)

    def _count(self, channels: int, size: int, checksum: int, reason: str) -> None:
        if size:
            self.channels = channels
            self.kept.extend((self.done, size, checksum))
        else:
            self.bad.append((self.done, reason))
        self.done += 1

    def finish(
        self,
        source: Source,
        names: list[bytes],
        size: int,
        kind: str,
        splits: Mapping[str, int] | None = None,
        shorter: int = 0,
    ) -> int:
        """Write the sections after the images, then the first page, and rename the file. Returns its size."""
        places, sizes, checksums = np.array(self.kept).reshape(-1, 3).T
        kept = [names[i] for i in places]
        contents = {
            "index": _bounds(sizes),
            "checksums": checksums.astype("<u4").tobytes(),
            "names": _bounds([len(name) for name in kept]) + b"".join(kept),
        }
        if source.labels is not None:
            contents["labels"] = source.labels.numpy()[places].astype("<i8").tobytes()
        end = PAGE + int(sizes.sum())
        sections: dict[str, tuple[int, int, int | None]] = {"data": (PAGE, end, None)}
        for name, content in contents.items():
            self.data.write(content)
            sections[name] = (end, end := end + len(content), crc32(content))
        what: dict[str, Any] = {"name": source.name, "kind": kind, "count": len(kept)}
        what |= {"channels": self.channels, "size": size, "classes": source.classes, "sections": sections}
        what |= {"splits": _left(splits, places)} if splits else {}
        what |= {"shorter": shorter} if shorter > size else {}
        version, text = SPLIT if splits or shorter > size else PLAIN, json.dumps(what).encode()
        self.data.write(text)
        self.data.close()
        with self.paths[0].open("r+b", buffering=0) as file:
            file.write(first_page(PREAMBLE.pack(MAGIC, version, crc32(text), end, len(text), end + len(text))))
            os.fsync(file.fileno())
        os.replace(self.paths[0], self.out)  # noqa: PTH105 - atomic
        self.close()  # the lock lasts until here
        self.paths[1].unlink(missing_ok=True)
        return end + len(text)

    def close(self) -> None:
        """Close the files, and remove them if they contain no image."""
        for file, path in zip(self.files, self.paths):
            file.close()
            if not self.kept:
                path.unlink(missing_ok=True)
