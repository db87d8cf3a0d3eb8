"""What the intervals of metrics follow from: which test images were right, or the metric on resampled test images.

Metrics travel as `Scores`, plain numbers that keep their evidence until a result is made of them; a result has
the intervals only.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tico_ssl.features.homes import TRAINED
from tico_ssl.results.confidence import LEVEL, Interval, Z, paired_interval, share_interval, student
from tico_ssl.results.record import Numbers, Stored
from tico_ssl.results.statistics import freedom_of, mean_and_deviation
from tico_ssl.runtime.randomness import generator

RESAMPLES = 1_000
DRAW = 12  # random stream of the resamples within the purpose "probe"
BLOCK = 2**22  # images in memory, over the resamples of a block


@dataclass(frozen=True)
class Right:
    """Which test images were right: bools (draws, images), of a single draw unless training images were drawn."""

    values: np.ndarray
    kind: ClassVar[str] = "right"

    def interval(self) -> Interval:
        """Of the accuracy, in per cent."""
        share = float(self.values.mean())
        worth, z = _worth(self.values.astype(np.int8), share * (1 - share))
        return _per_cent(share_interval(share * worth, worth, z))

    def difference(self, other: object) -> Interval | None:
        """Of this accuracy minus another on the same images and draws, in per cent."""
        if not isinstance(other, Right) or self.values.shape != other.values.shape:
            return None
        gained = float((self.values & ~other.values).mean())
        lost = float((other.values & ~self.values).mean())
        change = self.values.astype(np.int8) - other.values.astype(np.int8)
        worth, z = _worth(change, gained + lost - (gained - lost) ** 2)
        return _per_cent(paired_interval(gained * worth, lost * worth, worth, z))

    def stored(self) -> dict[str, Any]:
        """As JSON, eight images to a byte."""
        return {"shape": list(self.values.shape), "bits": np.packbits(self.values).tobytes().hex()}

    @classmethod
    def restored(cls, line: Mapping[str, Any]) -> "Right":
        draws, images = line["shape"]
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(line["bits"]), np.uint8), count=draws * images)
        return cls(bits.astype(bool).reshape(draws, images))


def _worth(values: np.ndarray, variance: float) -> tuple[float, float]:
    """How many images of a single draw, each of this variance, would give a mean as certain as that of values (draws,
    images), and the quantile that goes with it. Another draw would give other means as other images would: the
    variances of both add up."""
    draws, images = values.shape
    if draws < 2 or images < 2 or variance <= 0:
        return float(images), Z
    parts = [float(values.mean(0).var(ddof=1)) / images, float(values.mean(1).var(ddof=1)) / draws]
    most = float(draws * images)
    worth = min(most, variance / sum(parts)) if sum(parts) > 0 else most
    return worth, student(freedom_of(parts, [images - 1, draws - 1]))


def _per_cent(shares: Interval) -> Interval:
    return 100 * shares[0], 100 * shares[1]


@dataclass(frozen=True)
class Resampled:
    """A metric, and its values on resamples of so many test images: for means over classes and other metrics that are
    no share of the images. The resamples are the same for every representation, so that differences are paired."""

    value: float
    values: np.ndarray
    images: int
    kind: ClassVar[str] = "resampled"

    def interval(self) -> Interval:
        """Of the metric, which stays within 0 and 100 if all its values do."""
        low, high = _percentiles(self.value, self.values)
        least, most = np.nanmin(self.values), np.nanmax(self.values)
        return max(low, 0.0) if least >= 0 else low, min(high, 100.0) if most <= 100 else high

    def difference(self, other: object) -> Interval | None:
        """Of this metric minus another on the same images."""
        if not isinstance(other, Resampled) or (self.images, len(self.values)) != (other.images, len(other.values)):
            return None
        return _percentiles(self.value - other.value, self.values - other.values)

    def stored(self) -> dict[str, Any]:
        """As JSON."""
        return {"value": self.value, "values": self.values.round(4).tolist(), "images": self.images}

    @classmethod
    def restored(cls, line: Mapping[str, Any]) -> "Resampled":
        return cls(line["value"], np.array(line["values"]), line["images"])


def _percentiles(value: float, resampled: np.ndarray) -> Interval:
    """The bootstrap's percentiles, moved so that the mean of the resamples is the value: an average precision, for
    one, is higher on resamples, in which images are repeated."""
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) - np.nanmean(resampled)
    return value + float(low), value + float(high)


Evidence = Right | Resampled
KINDS: tuple[type[Right] | type[Resampled], ...] = (Right, Resampled)


class Scores(dict[str, float]):
    """Metrics by name, and evidence for some of them. It is a dict of numbers, and `|` keeps the evidence."""

    def __init__(
        self,
        numbers: Mapping[str, float] | Iterable[tuple[str, float]] = (),
        evidence: Mapping[str, Evidence] | None = None,
    ) -> None:
        super().__init__(numbers)
        self.evidence = dict(evidence or {})

    def __or__(self, other: Mapping[str, float]) -> "Scores":  # type: ignore[override]
        return Scores({**self, **other}, self.evidence | evidence_of(other))

    def __ior__(self, other: Mapping[str, float]) -> "Scores":  # type: ignore[override]
        return self | other  # a dict's own would lose the evidence

    def renamed(self, name: Callable[[str], str]) -> "Scores":
        """The same under other names."""
        return Scores(
            {name(metric): value for metric, value in self.items()},
            {name(metric): found for metric, found in self.evidence.items()},
        )


def evidence_of(numbers: Mapping[str, float]) -> dict[str, Evidence]:
    """The evidence that metrics have; plain numbers have none."""
    return numbers.evidence if isinstance(numbers, Scores) else {}


def accuracies(right: Mapping[str, Tensor]) -> Scores:
    """Per cent of test images that are right, by metric, from bools (images); from (draws, images) the mean and the
    standard deviation over draws."""
    found = {name: values.cpu().numpy().reshape(-1, values.shape[-1]) for name, values in right.items()}
    numbers: Numbers = {}
    for name, values in found.items():
        numbers |= mean_and_deviation([{name: 100 * float(draw.mean())} for draw in values])
    return Scores(numbers, {name: Right(values) for name, values in found.items()})


def over_draws(runs: Sequence[Numbers]) -> Scores:
    """Mean and standard deviation of each metric over draws of the training images, whose test images are the same."""
    evidence: dict[str, Evidence] = {}
    for name in runs[0]:
        draws = [found.values for run in runs if isinstance(found := evidence_of(run).get(name), Right)]
        if len(draws) == len(runs) and len({values.shape for values in draws}) == 1:
            evidence[name] = Right(np.concatenate(draws))
    return Scores(mean_and_deviation(runs), evidence)


def resampled(
    value: float, metric: Callable[[np.ndarray], np.ndarray], images: int, resamples: int = RESAMPLES
) -> Resampled:
    """A metric, and its values on resamples: it is given how often each image counts, (resamples, images)."""
    return Resampled(value, np.concatenate([metric(counts) for counts in _resamples(images, resamples)]), images)


def _resamples(images: int, number: int) -> Iterable[np.ndarray]:
    """How often each image is drawn, by resample: blocks of (resamples, images). A function of the two numbers, so
    that all representations have the same."""
    draw, block = generator(0, "probe", DRAW, images), max(1, BLOCK // images)
    for begin in range(0, number, block):
        size = min(block, number - begin)
        places = torch.randint(images, (size, images), generator=draw)
        places += images * torch.arange(size).unsqueeze(1)
        counts = torch.bincount(places.ravel(), minlength=size * images)
        yield counts.view(size, images).float().numpy()


def means(values: Mapping[str, Tensor]) -> Scores:
    """Means over test images in per cent, from a value between 0 and 1 of each; shares where these are bools."""
    shares = accuracies({name: each for name, each in values.items() if each.dtype == torch.bool})
    numbers, evidence = {}, dict(shares.evidence)
    for name, each in values.items():
        numbers[name] = shares[name] if name in shares else 100 * float(each.double().mean())
        if name not in shares:
            numpy = each.double().cpu().numpy()
            evidence[name] = resampled(numbers[name], partial(_mean, numpy), len(numpy))
    return Scores(numbers, evidence)


def mean_of(name: str, values: Tensor) -> Scores:
    """A mean over images, of any values, in their own unit."""
    numpy = values.double().cpu().numpy()
    value = float(numpy.mean())
    return Scores({name: value}, {name: resampled(value, lambda counts: counts @ numpy / len(numpy), len(numpy))})


def _mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    shares: np.ndarray = counts @ values / len(values)
    return 100 * shares


def intervals_of(numbers: Mapping[str, Numbers]) -> tuple[Stored, Stored]:
    """Intervals of the metrics by representation, and of trained minus each other representation."""
    evidence = {name: found for name, scores in numbers.items() if (found := evidence_of(scores))}
    intervals = {name: {metric: one.interval() for metric, one in found.items()} for name, found in evidence.items()}
    ours = evidence.get(TRAINED, {})
    differences = {
        name: {metric: ours[metric].difference(one) for metric, one in found.items() if metric in ours}
        for name, found in evidence.items()
        if name != TRAINED and ours
    }
    return _as_stored(intervals), _as_stored(differences)


def _as_stored(found: Mapping[str, Mapping[str, Interval | None]]) -> Stored:
    """Rounded far below what any table shows; those that are not known are left out."""
    return {
        name: known
        for name, by_metric in found.items()
        if (
            known := {
                metric: [round(pair[0], 4), round(pair[1], 4)]
                for metric, pair in by_metric.items()
                if pair is not None and all(map(math.isfinite, pair))
            }
        )
    }


def as_line(numbers: Numbers) -> dict[str, Any]:
    """Metrics with their evidence as JSON; metrics without any as they are."""
    kept = evidence_of(numbers)
    if not kept:
        return dict(numbers)
    return {"numbers": dict(numbers), "evidence": {name: {one.kind: one.stored()} for name, one in kept.items()}}


def from_line(line: dict[str, Any]) -> Numbers:
    """The metrics of such a line."""
    if not isinstance(line.get("numbers"), dict):
        return line
    kinds = {kind.kind: kind for kind in KINDS}
    found = {name: kinds[kind].restored(one) for name, by in line["evidence"].items() for kind, one in by.items()}
    return Scores(line["numbers"], found)
