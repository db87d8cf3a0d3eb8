"""Metrics of a protocol: unit, digits, which direction is better. Each protocol declares them in its own file.

    METRICS = (Metric("top1", "%", better="higher", verdict=True), Metric("weight_decay", shown=False))

They are read without importing the protocol. Numbers that are not declared are shown unrounded and never used for
a verdict.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from tico_ssl.config import catalogue
from tico_ssl.config.study import Study
from tico_ssl.results.record import Numbers
from tico_ssl.results.statistics import DEVIATION, with_deviation
from tico_ssl.runtime.errors import UserError

USUAL = tuple(Study().protocols)  # default evaluations


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics whose names depend on settings."""

    name: str
    """Name in the result, with `*` as a wildcard: top1_k* matches top1_k20 and top1_k200."""
    unit: str = ""
    """Unit, such as %."""
    digits: int = 1
    """Decimal places in tables."""
    better: Literal["higher", "lower", "near 1"] | None = None
    """None: neither."""
    verdict: bool = False
    """Whether it can decide if pretraining helped (see `results/verdict.py`)."""
    shown: bool = True
    """False: recorded but not shown, such as a selected weight decay."""
    share: bool = False
    """Whether it is the share of the test images that are right, whose number bounds its error."""
    among_runs: bool = False
    """Whether it ranks runs of one kind only, as metrics without labels do: untrained features may have the better."""

    def __post_init__(self) -> None:
        if self.verdict and self.better not in ("higher", "lower"):
            raise UserError(f"metric '{self.name}' may carry the verdict, so it must declare which direction is better")

    @property
    def sign(self) -> int:
        """What a difference is multiplied by, so that positive is better."""
        return -1 if self.better == "lower" else 1

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return "points" if self.unit == "%" else self.unit


# Accuracies, with or without a setting in the name, such as top1_k20.
TOP1 = Metric("top1*", "%", better="higher", verdict=True, share=True)
TOP5 = Metric("top5*", "%", better="higher", share=True)

WAYS = {"higher": "↑", "lower": "↓", "near 1": "→1", None: ""}
"""Signs in tables of which way is better; without a sign, none is."""


@dataclass(frozen=True)
class Quantity:
    """A metric of a protocol by its full name."""

    protocol: str
    name: str
    metric: Metric

    def __str__(self) -> str:
        return f"{self.protocol} {self.name}"

    @property
    def title(self) -> str:
        """Name with unit."""
        return f"{self.name} ({self.metric.unit})" if self.metric.unit else self.name

    @property
    def directed_title(self) -> str:
        """Name with unit, and the sign of which way is better."""
        return f"{self.title} {self.way}".rstrip()

    @property
    def row_title(self) -> str:
        """The same after the protocol, a name that both have only once: rankme, rankme embedding."""
        name = f"_{self.name}".removesuffix(f"_{self.protocol}").removeprefix("_")
        unit = f"({self.metric.unit})" if self.metric.unit else ""
        return " ".join(filter(None, (self.protocol, name, unit, self.way)))

    @property
    def way(self) -> str:
        """The sign of which way is better, in brackets if between runs of one kind only; empty if none is."""
        sign = WAYS[self.metric.better]
        return f"({sign})" if sign and self.metric.among_runs else sign


@dataclass(frozen=True)
class Measurement(Quantity):
    """Values by representation, with the standard deviation over repetitions if there are any."""

    values: Numbers
    deviations: Numbers

    def text(self, representation: str) -> str:
        """Text of a table cell; empty if not measured."""
        if representation not in self.values:
            return ""
        return with_deviation(self.values[representation], self.deviations.get(representation), self.metric.digits)

    @property
    def reference(self) -> str | None:
        """The column that decides whether pretraining helped: the weights it started from, if any, else untrained."""
        return next((name for name in ("initial", "untrained") if name in self.values), None)

    def gain_over(self, column: str) -> float | None:
        """Difference between trained and another column, in the metric's unit; None without either."""
        if not {"trained", column} <= self.values.keys():
            return None
        return self.values["trained"] - self.values[column]


def declared(protocol: str) -> tuple[Metric, ...]:
    """The metrics that a protocol declares."""
    metrics = tuple(catalogue.declaration("evaluations", protocol, "METRICS", ()))
    if not all(isinstance(metric, Metric) for metric in metrics):
        raise UserError(f"evaluation {protocol}: METRICS are of type Metric")
    return metrics


def first_of_each(names: Iterable[tuple[str, Iterable[str]]]) -> list[Quantity]:
    """The first shown metric of every protocol."""
    found: dict[str, Quantity] = {}
    for one in all_of_each(names):
        found.setdefault(one.protocol, one)
    return list(found.values())


def all_of_each(names: Iterable[tuple[str, Iterable[str]]]) -> list[Quantity]:
    """Every shown metric of every protocol, those of a protocol together."""
    together: dict[str, list[str]] = {}
    for protocol, given in names:
        together.setdefault(protocol, []).extend(given)
    return [one for protocol, given in together.items() for one in _shown(protocol, given)]


def measurements(protocol: str, numbers: Mapping[str, Numbers]) -> list[Measurement]:
    """The metrics of a result that are shown."""
    shown = _shown(protocol, (name for found in numbers.values() for name in found))
    return [
        Measurement(protocol, one.name, one.metric, _under(one.name, numbers), _under(one.name + DEVIATION, numbers))
        for one in shown
    ]


def _shown(protocol: str, names: Iterable[str]) -> list[Quantity]:
    known = _known(protocol)
    every = (Quantity(protocol, name, _matching(name, known)) for name in dict.fromkeys(names))
    return [one for one in every if one.metric.shown and not one.name.endswith(DEVIATION)]


def _known(protocol: str) -> tuple[Metric, ...]:
    """Results outlive protocols: of one that was removed or fails to load, nothing is known."""
    try:
        return declared(protocol)
    except Exception:
        return ()


def _matching(name: str, metrics: tuple[Metric, ...]) -> Metric:
    return next((metric for metric in metrics if fnmatchcase(name, metric.name)), Metric(name))


def _under(name: str, numbers: Mapping[str, Numbers]) -> Numbers:
    return {representation: found[name] for representation, found in numbers.items() if name in found}
