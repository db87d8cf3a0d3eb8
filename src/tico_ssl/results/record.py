"""A run as read from its folder, and a result as stored in results.jsonl."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.run_folder import Run

Numbers = dict[str, float]
Line = dict[str, Any]
Stored = dict[str, dict[str, list[float]]]  # [low, high] of 95 % intervals, by representation and metric
QUIET = 600.0  # minimum seconds without activity after which a run counts as stopped
KNN = "knn_top1_k20"  # the metric of online kNN
LARGEST = 1e100  # of numbers that are measured, and the inverse of the smallest
SEEN = "test_images_seen"  # without labels, in pretraining: what a result says of its data


@dataclass(frozen=True)
class Result:
    """One line of results.jsonl: metrics with everything that they depend on."""

    protocol: str
    settings: dict[str, Any]
    data: dict[str, Any]
    checkpoint: str
    seed: int
    numbers: dict[str, Numbers]
    seconds: float
    images: str | None = None
    """Digest of the images and labels, by which a result is known that already exists; None: unknown."""
    intervals: Stored = field(default_factory=dict)
    """Of metrics, over test images, where they are known (see `results/intervals.py`)."""
    differences: Stored = field(default_factory=dict)
    """Of trained minus each other representation."""

    @property
    def line(self) -> Line:
        """As stored in results.jsonl: without intervals where there are none."""
        values = asdict(self)
        return {key: value for key, value in values.items() if value or key not in ("intervals", "differences")}


def images_of(data: Line, split: str) -> int | None:
    """The number of images of a split that a result is about, without those that could not be read; None if it does not
    say so."""
    images, unread = data.get(split), data.get("unread", {})
    out = unread.get(split, 0) if isinstance(unread, dict) else None
    return images - out if isinstance(images, int) and isinstance(out, int) else None


def split_in_words(data: Line) -> str:
    """How a result's test images were chosen, and whether pretraining has seen them."""
    return f"{data['split']}{', seen without labels in pretraining' if data.get(SEEN) else ''}"


def same_source(one: str | Sequence[str], other: str | Sequence[str], folder: str = "") -> bool:
    """Whether data are the same, given as places or as the line that results have of them: `photos` is `photos/`. Paths
    are relative to a folder, by default the working directory."""
    lines = [given if isinstance(given, str) else " + ".join(given) for given in (one, other)]
    first, second = ([os.path.abspath(Path(folder, place)) for place in line.split(" + ")] for line in lines)  # noqa: PTH100 - urls
    return first == second


def is_result(line: Line) -> bool:
    """Numbers by representation, of a protocol. Results of older versions may lack the rest."""
    numbers = line.get("numbers")
    if not isinstance(line.get("protocol"), str) or not isinstance(numbers, dict):
        return False
    kinds = {"settings": dict, "data": dict, "checkpoint": str}
    if any(key in line and not isinstance(line[key], kind) for key, kind in kinds.items()):
        return False
    if not is_number(line.get("seconds", 0)):
        return False
    return all(isinstance(found, dict) and all(map(is_number, found.values())) for found in numbers.values())


def is_number(value: Any) -> bool:
    """A number that was measured: finite, and so far from the ends of floating point that sums, squares and ratios of
    such numbers are finite, too."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and (value == 0 or 1 / LARGEST <= abs(value) <= LARGEST)  # False for NaN


@dataclass(frozen=True)
class Record:
    """A run as read from its folder."""

    run: Run
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[Line]
    spectrum: list[Line]
    results: list[Line]
    bad_files: list[Line]
    warnings: list[str]
    checkpoint: str | None
    last_sign: float
    """Time of the last write, in seconds since the epoch."""
    now: float = field(default_factory=time.time)
    timed: tuple[float, float] | None = None
    """Seconds of training and images per second, as a study measured them on an idle machine."""
    damage: list[str] = field(default_factory=list)
    """What could not be read of it, in sentences without a full stop."""
    found_images: int | None = None
    """Number of images that it found to train on."""

    @property
    def images(self) -> int | None:
        """Number of images that it trained on; of older versions what the recipe says, if it does."""
        limit: int | None = self.setting("data.limit")
        return limit if self.found_images is None else self.found_images

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.run.folder.resolve().name

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the recipe by its path, such as training.epochs."""
        value: Any = self.recipe
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def logged(self) -> list[Line]:
        """Metrics of training steps."""
        return [line for line in self.metrics if "loss" in line and line.get("images_per_second", 0) > 0]

    @cached_property
    def between_epochs(self) -> list[Line]:
        """Metrics of online kNN."""
        return [line for line in self.metrics if any(key.startswith("knn_") for key in line)]

    @property
    def knn_on_the_way(self) -> list[tuple[float, float]]:
        """Epochs with the accuracy of online kNN."""
        return [(line["epoch"], line[KNN]) for line in self.between_epochs if {"epoch", KNN} <= line.keys()]

    @property
    def knn_images(self) -> int | None:
        """The number of test images of online kNN; None in runs of older versions."""
        images = self.between_epochs[-1].get("test_images") if self.between_epochs else None
        return images if isinstance(images, int) and images > 0 else None

    @property
    def epochs(self) -> int:
        """Epochs of the recipe."""
        return int(self.setting("training.epochs") or 0)

    @property
    def batch_size(self) -> int:
        """Images per step of the recipe."""
        return int(self.setting("training.batch_size") or 0)

    @property
    def epoch(self) -> float:
        """The last epoch reached."""
        return float(self.metrics[-1].get("epoch", 0.0)) if self.metrics else 0.0

    @property
    def finished(self) -> bool:
        """Whether training is complete."""
        return self.epochs > 0 and self.epoch >= self.epochs

    @property
    def running(self) -> bool:
        """Whether it seems to be running: its last write is recent, relative to its logging interval."""
        clock = [line["seconds"] for line in self.logged if "seconds" in line]
        gap = (clock[-1] - clock[0]) / (len(clock) - 1) if len(clock) > 1 else 0.0
        return not self.finished and self.now - self.last_sign < max(QUIET, 5 * gap)

    @property
    def state(self) -> str:
        """Progress, in words."""
        if self.finished:
            return "finished"
        reached = f"epoch {self.epoch:.3g} of {self.epochs}" if self.metrics else "before its first logged step"
        ago = duration(max(0.0, self.now - self.last_sign))
        if self.running:
            return f"in progress: {reached}, last activity {ago} ago"
        return f"stopped: {reached}, last activity {ago} ago; continue with `tico pretrain --resume`"

    @property
    def seconds(self) -> float:
        """Wall-clock time from the start to the last logged step, without interruptions."""
        return float(self.logged[-1].get("seconds", 0.0)) if self.logged else 0.0

    @cached_property
    def training_seconds(self) -> float:
        """Time of training steps only."""
        return sum(step_seconds(self.logged, self.batch_size))

    @cached_property
    def waiting_seconds(self) -> float:
        """Of this time, the part spent waiting for images."""
        parts = step_seconds(self.logged, self.batch_size)
        waited: float = sum(part * line.get("data_wait", 0.0) for part, line in zip(parts, self.logged))
        return min(waited, self.training_seconds)

    @property
    def images_per_second(self) -> float | None:
        """Mean throughput of the run."""
        images = self.logged[-1]["step"] * self.batch_size if self.logged else 0
        return images / self.training_seconds if self.training_seconds > 0 else None

    @property
    def cost(self) -> tuple[float, float] | None:
        """Seconds of training steps and images per second, to compare runs by; None before the first step."""
        if self.timed is not None:
            return self.timed
        speed = self.images_per_second
        return None if speed is None else (self.training_seconds, speed)

    @cached_property
    def current_results(self) -> dict[str, Line]:
        """The latest result of each protocol for the current backbone."""
        return {line["protocol"]: line for line in self.results if line.get("checkpoint") == self.checkpoint}

    @property
    def newest_results(self) -> list[Line]:
        """All results but those that a later one replaces: of the same checkpoint, protocol, settings and data."""
        kept: dict[str, Line] = {}
        for line in self.results:
            what = [line.get("checkpoint"), line["protocol"], line.get("settings"), told_apart(line.get("data", {}))]
            key = json.dumps(what, sort_keys=True, default=str)
            kept.pop(key, None)  # the later one takes its own place in the order
            kept[key] = line
        return list(kept.values())

    @property
    def numbers(self) -> list[tuple[str, dict[str, Numbers]]]:
        """Metrics by representation of these results, with their protocols."""
        return [(protocol, result["numbers"]) for protocol, result in self.current_results.items()]

    @cached_property
    def collapse(self) -> list[str]:
        """Signs of collapse at the last logged step."""
        return list(collapse_signs(self.logged[-1], None).values()) if self.logged else []


def told_apart(data: Line) -> list[Any]:
    """What tells the data of results apart; what else a result says of them may be measured anew each time."""
    return [data.get(key) for key in ("source", "train", "test", "split", "precision")]


def step_seconds(logged: Sequence[Line], batch_size: int) -> list[float]:
    """Time of the training steps of each logged interval, without checkpoints and evaluations."""
    steps = [0, *(line["step"] for line in logged)]
    return [(line["step"] - before) * batch_size / line["images_per_second"] for before, line in zip(steps, logged)]


def duration(seconds: float) -> str:
    """A readable duration: 45 s, 12 min, 3.5 h, 2 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
