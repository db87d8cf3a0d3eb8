"""Did pretraining help, and did it collapse? One rule for `evaluate`, `compare`, `study`, `report` and model cards.

One metric decides, the first of `ORDER` that was measured. Over the reference, which is what the run started from,
pretraining

    helped          if the 95 % interval of the difference is above 0,
    harmed          if it is below 0,
    did not help    if it is below the smallest gain that matters,
    else nobody can tell.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.confidence import Interval, unpaired_interval
from tico_ssl.results.intervals import difference_interval
from tico_ssl.results.metrics import Measurement, Quantity, measurements
from tico_ssl.results.record import Line, images_of, is_number
from tico_ssl.results.statistics import Spread
from tico_ssl.runtime.wording import counted

Outcome = Literal["helped", "harmed", "did not help", "cannot tell"]

ORDER = (
    *("linear", "knn", "linear-augmented", "places205", "inaturalist2018", "fine-tune", "svm"),
    *("semi-supervised", "retrieval", "detection", "segmentation"),
)
"""Protocols that decide before all others, surest first; those from elsewhere come next."""
LAST = ("few-shot",)  # a few labels say least about features
PREFERRED = {"knn": "top1_k20"}  # where a protocol has several metrics of equal rank

WORDS = {"initial": "of the weights it started from", "untrained": "untrained", "pixels": "from raw pixels"}
POINTS = 1.0  # the smallest gain that matters, in the metric's unit: a point of accuracy
MOST_FACTOR = 100  # times as many test images are no advice


@dataclass(frozen=True)
class Verdict:
    """The deciding metric, the column that counts, and the gain over it: positive is better, whatever the metric's
    direction."""

    by: Measurement
    gain: float
    reference: str = "untrained"
    interval: Interval | None = None
    """95 % interval of the gain: over seeds if there are several, else over test images; None: not known."""
    seeds: int = 1
    images: int | None = None
    """Number of test images, if known."""
    others: Mapping[str, Interval] | None = None
    """Intervals of trained minus each other column, where known."""

    @property
    def outcome(self) -> Outcome:
        """The rule."""
        if self.interval is None:
            return "cannot tell"
        low, high = self.interval
        if low > 0:
            return "helped"
        return "harmed" if high < 0 else "did not help" if high < POINTS else "cannot tell"

    @property
    def difference(self) -> float:
        """Trained minus the reference, in the metric's own direction."""
        return self.by.metric.sign * self.gain

    @property
    def difference_interval(self) -> Interval | None:
        """Of this difference."""
        return _directed(self.interval, self.by)

    @property
    def helped(self) -> bool:
        """Surely better than the reference."""
        return self.outcome == "helped"

    @property
    def harmed(self) -> bool:
        """Surely worse than the reference."""
        return self.outcome == "harmed"

    @property
    def undecided(self) -> bool:
        """Whether nobody can tell."""
        return self.outcome == "cannot tell"

    def __str__(self) -> str:
        return self.sentence(str(self.by))

    def sentence(self, name: str) -> str:
        """The verdict in words; `name` is what the deciding metric is called."""
        say: dict[Outcome, str] = {
            "helped": "Pretraining helped",
            "harmed": "Pretraining did not help, it harmed",
            "did not help": "Pretraining did not help",
            "cannot tell": "Cannot tell whether pretraining helped",
        }
        against = f"{self._value('trained')} against {self._value(self.reference)} {_of(self.reference)}"
        parts = [f"{say[self.outcome]}: {name} {against}: {self._difference()}."]
        names = [name for name in self.by.values if name not in ("trained", self.reference)]
        if names:
            parts.append(f"Also: {_listed([self._other(name) for name in names])}.")
        return " ".join([*parts, self._advice()] if self.undecided else parts)

    def _value(self, column: str) -> str:
        return f"{self.by.text(column)} {self.by.metric.unit}".rstrip()

    def _difference(self) -> str:
        metric = self.by.metric
        difference = f"{signed(self.difference, metric.digits)} {metric.points}".rstrip()
        ends = self.difference_interval
        known = ["interval not known" if ends is None else f"95 % interval {between(*ends, metric.digits)}"]
        if self.seeds > 1:
            known.append(counted(self.seeds, "seed"))
        elif self.images is not None:
            known.append(counted(self.images, "test image"))
        return f"{difference} ({', '.join(known)})"

    def _other(self, column: str) -> str:
        """Another column, with the interval of the difference if it is a model to compare with."""
        text = f"{self._value(column)} {_of(column)}"
        found = (self.others or {}).get(column)
        if found is None or column in WORDS:
            return text
        gain = self.by.values["trained"] - self.by.values[column]
        digits = self.by.metric.digits
        return f"{text} ({signed(gain, digits)}, {between(*found, digits)})"

    def _advice(self) -> str:
        """What would help to decide."""
        if self.seeds > 1:
            return "More seeds would tell."
        if self.interval is None:
            return "Several seeds would give one."
        low, high = self.interval
        reach = self.gain - low if self.gain > 0 else high - self.gain  # on the side of 0
        factor = (reach / self.gain) ** 2 if self.gain else MOST_FACTOR + 1
        if self.images is None or factor > MOST_FACTOR:
            return "More test images, or several seeds, would tell."
        number = f"about {_roughly(max(factor * self.images, self.images + 1)):,} if the difference stays"
        return f"More test images ({number}), or several seeds, would tell."


def _roughly(number: float) -> int:
    """Rounded up to one digit."""
    unit = int(10.0 ** math.floor(math.log10(number)))
    return math.ceil(number / unit) * unit


def _of(column: str) -> str:
    return WORDS.get(column, f"of {column}")


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def signed(value: float, digits: int) -> str:
    """+9.5, -0.3, or 0.0 without a sign."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def unsigned(value: float, digits: int) -> str:
    """9.5, -0.3, or 0.0 without a sign."""
    return f"{value:z.{digits}f}"


def between(low: float, high: float, digits: int, write: Callable[[float, int], str] = signed) -> str:
    """An interval in words: +6.3 to +12.7."""
    return f"{write(low, digits)} to {write(high, digits)}"


def verdict(lines: Iterable[Line], reference: str | None = None) -> Verdict | None:
    """From the results of a run, one of each protocol; None if no metric can decide. The reference is by default what
    the run started from: given weights, else untrained ones."""
    return verdict_over_seeds([[*lines]], reference)


def verdict_over_seeds(runs: Sequence[Sequence[Line]], reference: str | None = None) -> Verdict | None:
    """From the results of runs that differ in their seed only. Three or more have the interval over seeds; each seed's
    reference is its own, so that they are paired. Of two, whose interval over seeds would say nothing (Student's factor
    is 12.7), it is what both intervals over test images span."""
    found = [_deciding(lines, reference) for lines in runs]
    known = [one for one in found if one is not None]
    if not known:
        return None
    line, by, column = known[0]
    alike = [(line, by) for line, by, against in known if (str(by), against) == (str(known[0][1]), column)]
    gains = Spread.of([by.metric.sign * (by.values["trained"] - by.values[column]) for _, by in alike])
    images = images_tested(line)
    if len(alike) > 1:
        interval = gains.interval if len(alike) > 2 else _spanned(alike, column) or gains.interval
        return Verdict(_mean([by for _, by in alike]), gains.mean, column, interval, len(alike), images)
    others = {name: pair for name in by.values if (pair := difference_interval(line, name, by.name)) is not None}
    return Verdict(by, gains.mean, column, _directed(gain_interval(line, by, column), by), 1, images, others)


def _spanned(runs: Sequence[tuple[Line, Measurement]], column: str) -> Interval | None:
    """The interval that holds those of all runs; None if one of them is not known."""
    ends = [_directed(gain_interval(line, by, column), by) for line, by in runs]
    known = [pair for pair in ends if pair is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(ends) else None


def _directed(pair: Interval | None, by: Measurement) -> Interval | None:
    """The interval of the gain, from that of the difference, or the other way."""
    return pair if pair is None or by.metric.sign > 0 else (-pair[1], -pair[0])


def gain_interval(line: Line, by: Measurement, column: str) -> Interval | None:
    """The interval of trained minus a column: paired where the result has it, else a wider one from the number of
    test images, which is all that results of older versions tell; None where that says nothing."""
    if (paired := difference_interval(line, column, by.name)) is not None:
        return paired
    images, shares = images_tested(line), [by.values[name] / 100 for name in ("trained", column)]
    if images is None or not by.metric.share or not all(0 <= share <= 1 for share in shares):
        return None
    low, high = unpaired_interval(shares[0], images, shares[1], images)
    return 100 * low, 100 * high


def images_tested(line: Line) -> int | None:
    """The number of test images of a result, if it says so."""
    images = images_of(line.get("data", {}), "test")
    return images if images is not None and is_number(images) and images > 0 else None


def _mean(found: Sequence[Measurement]) -> Measurement:
    """Means over seeds."""
    first = found[0]
    columns = [name for name in first.values if all(name in one.values for one in found)]
    spreads = {name: Spread.of([one.values[name] for one in found]) for name in columns}
    means = {name: spread.mean for name, spread in spreads.items()}
    deviations = {name: spread.deviation or 0.0 for name, spread in spreads.items()}
    return Measurement(first.protocol, first.name, first.metric, means, deviations)


def _deciding(lines: Iterable[Line], reference: str | None) -> tuple[Line, Measurement, str] | None:
    """The result and the metric of it that decide, and the column to compare with."""
    candidates = [
        (line, one, column)
        for line in lines
        for one in measurements(line["protocol"], line["numbers"])
        if one.metric.verdict and (column := reference or one.reference) is not None
        if one.gain_over(column) is not None
    ]
    return min(candidates, key=lambda found: rank(found[1]), default=None)


def rank(quantity: Quantity) -> tuple[int, bool]:
    """The place of a metric among those that may decide; smaller decides."""
    last = len(ORDER) + (quantity.protocol in LAST)
    place = ORDER.index(quantity.protocol) if quantity.protocol in ORDER else last
    preferred = PREFERRED.get(quantity.protocol, quantity.name)
    return place, not f"{quantity.name}_".startswith(f"{preferred}_")  # it may go on: top1_k20_t0.07


def in_order(protocol: str) -> int:
    """The place of a protocol in what people read: those that may decide first, surest first; others keep theirs."""
    known = (*ORDER, *LAST)
    return known.index(protocol) if protocol in known else len(known)


def collapse_verdict(last: Mapping[str, float], lines: Iterable[Line]) -> str:
    """Collapse in a word, from the signs at the last step and the comparison with untrained features:

    without signs no, or worse if features are worse than untrained; with signs yes, or signs if they are better.
    """
    found = verdict(lines, "untrained")
    if collapse_signs(last, None):
        return "signs" if found is not None and found.helped else "yes"
    return "worse" if found is not None and found.harmed else "no"
