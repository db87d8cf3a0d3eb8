"""Check of a data set before training: sizes, formats, unreadable files, duplicates."""

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tico_ssl.data.bad_files import in_order
from tico_ssl.data.decoding import BadImage, read_file
from tico_ssl.data.opening import open_picture
from tico_ssl.data.source import Source
from tico_ssl.data.splits import Part
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.wording import counted

SMALL_SIZES = (32, 64)  # pixels, instead of those of the recipes
FEW, MANY = 5_000, 100_000  # images, of which a network learns little by itself, and of which a transformer learns


class Examined(NamedTuple):
    """Findings about one file."""

    name: str
    digest: bytes
    size: int
    height: int
    width: int
    kind: str
    mode: str
    reason: str | None


@dataclass(frozen=True)
class CheckReport:
    """Findings about all files of a source."""

    name: str
    files: int
    bytes: int
    heights: np.ndarray
    widths: np.ndarray
    formats: Counter[str]
    modes: Counter[str]
    bad: list[tuple[str, str]]
    bad_places: list[int]
    duplicates: list[list[str]]

    @property
    def side(self) -> float:
        """The median of the shorter sides, in pixels."""
        return float(np.median(np.minimum(self.heights, self.widths))) if len(self.heights) else 0.0

    def lines(self) -> Iterator[str]:
        """The report as text."""
        good = self.files - len(self.bad)
        yield f"{self.name}: {counted(self.files, 'file')}, {self.bytes / 2**20:,.1f} MiB, {good:,} readable"
        if good:
            for axis, values in (("width", self.widths), ("height", self.heights)):
                low, middle, high = np.percentile(values, [0, 50, 100]).round().astype(int)
                yield f"{axis:<11}{low} to {high} pixels, median {middle}"
            yield f"{'formats':<11}{_counted(self.formats)}"
            yield f"{'modes':<11}{_counted(self.modes)}"
        if self.duplicates:
            extra = sum(len(group) - 1 for group in self.duplicates)
            example = " = ".join(self.duplicates[0][:2])
            yield f"{'duplicates':<11}{counted(extra, 'copy')} of another file, such as {example}"
        if self.bad:
            yield f"{'bad':<11}{counted(len(self.bad), 'file')} cannot be read ({len(self.bad) / self.files:.1%})"


def contents(parts: Sequence[Part]) -> Iterator[str]:
    """What is in every split, and what it is for, as text."""
    there = {part.split for part in parts}
    uses = {"train": "to pretrain on", "test": "to test on", "val": "to choose by" if "test" in there else "to test on"}
    if there == {"train"}:
        uses["train"] += "; evaluations hold some out"
    for part in parts:
        yield f"{part.split:<11}{counted(len(part.source), 'image')}, {_classes(part.source)}: {uses[part.split]}"


def shared(parts: Sequence[Part], duplicates: Sequence[Sequence[str]]) -> Iterator[str]:
    """Images that are in several splits, as text: a test image that was trained on tells nothing. Where there are
    several splits, names begin with the folder of theirs."""
    leaks = []
    for group in duplicates:
        firsts = [next((name for name in group if name.startswith(f"{part.folder}/")), None) for part in parts]
        if len(found := [name for name in firsts if name is not None]) > 1:
            leaks.append(found)
    if len(parts) > 1 and leaks:
        example = " = ".join(leaks[0][:2])
        yield f"{'leaks':<11}{counted(len(leaks), 'image')} in more than one split, such as {example}"


def _classes(source: Source) -> str:
    if source.labels is None:
        return "no labels"
    if source.labels.ndim > 1:
        return f"several labels each, of {counted(source.labels.shape[1], 'class')}"
    here, known = len(source.labels.unique()), len(source.classes)
    return f"{here:,} of {counted(known, 'class')}" if here < known else counted(here, "class")


def recommended(images: int, side: float, channels: int = 3) -> list[str]:
    """The recipe for so many images of such a shorter side in pixels, with overrides: from public weights if they are
    few, a transformer if they are many; small ones and other channels as they are."""
    size = next((size for size in SMALL_SIZES if side < 1.5 * size), None)
    usual = size is None and channels == 3
    words = ["photos-continue" if usual and images < FEW else "photos-vit" if usual and images >= MANY else "photos"]
    if size is not None:
        words.append(f"data.image_size={size}")
    if channels != 3:
        words.append(f"backbone.channels={channels}")
    return words


def check(source: Source, workers: int = 4, label: str | None = None) -> CheckReport:
    """Read and decode every image of a source, with several threads."""
    with ThreadPoolExecutor(workers) as pool:
        results = in_order(pool, lambda place: examine(source, place), range(len(source)), 8 * workers)
        examined = list(track(results, len(source), label))
    good = [file for file in examined if file.reason is None]
    groups: defaultdict[bytes, list[str]] = defaultdict(list)
    for file in good:
        groups[file.digest].append(file.name)
    return CheckReport(
        source.name,
        len(examined),
        sum(file.size for file in examined),
        np.array([file.height for file in good]),
        np.array([file.width for file in good]),
        Counter(file.kind for file in good),
        Counter(file.mode for file in good),
        [(file.name, file.reason) for file in examined if file.reason is not None],
        [place for place, file in enumerate(examined) if file.reason is not None],
        [names for names in groups.values() if len(names) > 1],
    )


def examine(source: Source, place: int) -> Examined:
    """Examine one image: its file if it has one, else its pixels."""
    name = printable(source.names(place))
    content = b""
    try:
        content = b"" if source.files is None else read_file(source.files(place), name)
        pixels = source.fetch(place)  # as the source decodes, whose format may be the user's own
        kind, mode = _header(content) if content else ("packed", f"{len(pixels)} channels")
        content = content or pixels.numpy().tobytes()
    except BadImage as bad:
        return Examined(name, b"", len(content), 0, 0, "", "", bad.reason)
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Examined(name, digest, len(content), pixels.shape[1], pixels.shape[2], kind, mode, None)


def _header(content: bytes) -> tuple[str, str]:
    try:
        with open_picture(io.BytesIO(content)) as image:
            return image.format or "?", image.mode
    except OSError:
        return "array", "array"


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())
