"""Unreadable files: skipped and listed once; too many of them stop a run before it starts."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines
from tico_ssl.runtime.wording import counted

SAMPLE = 1_000  # files that are tried before a run starts

S = TypeVar("S")
T = TypeVar("T")


class BadFiles:
    """The bad files of a run with their reasons. Thread-safe."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, bad: BadImage) -> None:
        """Record a file."""
        with self._lock:
            self.reasons.setdefault(bad.name, bad.reason)

    def write(self, path: Path) -> None:
        """Append the findings of all processes to a JSON lines file, every name once. A collective call."""
        with self._lock:
            mine = dict(self.reasons)
        for found in distributed.everyone(mine):
            self.reasons = found | self.reasons
        if distributed.is_main() and self.reasons:
            written = {line.get("file") for line in read_json_lines(path)}
            for name, reason in self.reasons.items():
                if name not in written:
                    append_json_line(path, {"file": name, "reason": reason})


def readable(source: Source, place: int, bad: BadFiles) -> Tensor:
    """The image at an index. If it cannot be read, the next readable one with the same label, or if there is none, with
    any: so a batch keeps its size, and its images their labels."""
    for other in _in_turn(source, place):
        try:
            return source.fetch(other)
        except BadImage as error:
            bad.add(error)
    raise UserError(f"{source.name}: none of the {counted(len(source), 'image')} can be read")


def _in_turn(source: Source, place: int) -> Iterator[int]:
    """All indices: a place, those behind it with its label, those with other labels."""
    yield place
    labels, count = source.labels, len(source)
    behind = [range(place + 1, count), range(place)]
    if labels is None:
        yield from chain(*behind)
        return
    for alike in (True, False):
        yield from (other for other in chain(*behind) if torch.equal(labels[other], labels[place]) == alike)


def reason_unread(source: Source, place: int) -> str:
    """Why an image could not be read, found by another try."""
    try:
        source.fetch(place)
    except BadImage as error:
        return error.reason
    return "it could not be read at first"


def attempts(source: Source, places: Iterable[int], workers: int) -> Iterator[Tensor | BadImage]:
    """Every image, or its error, in order, from several threads."""

    def attempt(place: int) -> Tensor | BadImage:
        try:
            return source.fetch(place)
        except BadImage as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        yield from in_order(pool, attempt, places, 4 * workers)


def in_order(pool: ThreadPoolExecutor, work: Callable[[S], T], items: Iterable[S], ahead: int) -> Iterator[T]:
    """Results in order, with a bounded number of pending ones, unlike pool.map."""
    waiting: deque[Future[T]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def survey(source: Source, most_bad: float, bad: BadFiles, workers: int) -> None:
    """Try a sample of a source's files, spread evenly, and raise if too many are bad. Processes share the work."""
    if source.images is not None:
        return
    sample = source.limited(SAMPLE)
    mine = range(distributed.rank(), len(sample), distributed.world_size())
    bad_ones = [result for result in attempts(sample, mine, workers) if isinstance(result, BadImage)]
    found = [BadImage(*pair) for part in distributed.everyone([(e.name, e.reason) for e in bad_ones]) for pair in part]
    for error in found:
        bad.add(error)
    if len(found) / len(sample) > most_bad:
        raise UserError(
            f"{source.name}: {len(found)} of {counted(len(sample), 'file')} tried cannot be read, {_reasons(found)}; "
            "see `tico data check`, or raise data.most_bad"
        )


def _reasons(found: list[BadImage]) -> str:
    """An example of the most frequent reason, and how often it is the reason."""
    reason, count = Counter(error.reason for error in found).most_common(1)[0]
    example = next(error.name for error in found if error.reason == reason)
    often = f", as {count} of them" if 1 < count < len(found) else ", as all of them" if count > 1 else ""
    return f"such as {example} ({reason}{often})"
