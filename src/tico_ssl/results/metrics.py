"""What the numbers of a protocol mean: unit, digits, which way is better. Each protocol declares it in its own file.

    METRICS = (Metric("top1", "%", better="higher", verdict=True), Metric("weight_decay", shown=False))

It is read without importing the protocol. Numbers that nobody has declared are shown as they are, and decide nothing.
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

USUAL = tuple(Study().protocols)  # what is measured where nobody says otherwise


@dataclass(frozen=True)
class Metric:
    """A number of a protocol, or several whose names depend on its settings."""

    name: str
    """As in the result. `*` stands for anything: top1_k* is top1_k20 and top1_k200."""
    unit: str = ""
    """Such as %."""
    digits: int = 1
    """After the point, where people read it."""
    better: Literal["higher", "lower"] | None = None
    """None: neither, or it depends."""
    verdict: bool = False
    """Whether it may say if pretraining helped. The first such number of a result does."""
    shown: bool = True
    """False: it belongs to the result but measures nothing, such as a weight decay that was chosen."""

    def __post_init__(self) -> None:
        if self.verdict and self.better is None:
            raise UserError(f"metric '{self.name}' may carry the verdict, so it must say which way is better")


# Accuracies, whatever setting stands behind the name, such as top1_k20.
TOP1 = Metric("top1*", "%", better="higher", verdict=True)
TOP5 = Metric("top5*", "%", better="higher")


@dataclass(frozen=True)
class Quantity:
    """A number of a protocol by its full name, and what is known of it."""

    protocol: str
    name: str
    metric: Metric

    def __str__(self) -> str:
        return f"{self.protocol} {self.name}"

    @property
    def title(self) -> str:
        """Its name, with the unit."""
        return f"{self.name} ({self.metric.unit})" if self.metric.unit else self.name


@dataclass(frozen=True)
class Measurement(Quantity):
    """Its value under every representation, with the standard deviation of repetitions where there were some."""

    values: Numbers
    deviations: Numbers

    def text(self, representation: str) -> str:
        """As it stands in a table; empty, where it was not measured."""
        if representation not in self.values:
            return ""
        return with_deviation(self.values[representation], self.deviations.get(representation), self.metric.digits)

    @property
    def gain(self) -> float | None:
        """What training added, in the metric's unit; None without an untrained number to compare with."""
        if not {"trained", "untrained"} <= self.values.keys():
            return None
        return self.values["trained"] - self.values["untrained"]


def declared(protocol: str) -> tuple[Metric, ...]:
    """What a protocol says of its numbers."""
    metrics = tuple(catalogue.declaration("evaluations", protocol, "METRICS", ()))
    if not all(isinstance(metric, Metric) for metric in metrics):
        raise UserError(f"evaluation {protocol}: METRICS are of type Metric")
    return metrics


def first_of_each(names: Iterable[tuple[str, Iterable[str]]]) -> list[Quantity]:
    """Of every protocol the first number that people are shown, among the names of its numbers."""
    found: dict[str, Quantity] = {}
    for protocol, given in names:
        if protocol not in found and (shown := _shown(protocol, given)):
            found[protocol] = shown[0]
    return list(found.values())


def measurements(protocol: str, numbers: Mapping[str, Numbers]) -> list[Measurement]:
    """The numbers of a result that people are shown."""
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
    """Results outlive protocols: of one that is gone, or broken by now, nothing is known."""
    try:
        return declared(protocol)
    except Exception:
        return ()


def _matching(name: str, metrics: tuple[Metric, ...]) -> Metric:
    return next((metric for metric in metrics if fnmatchcase(name, metric.name)), Metric(name))


def _under(name: str, numbers: Mapping[str, Numbers]) -> Numbers:
    return {representation: found[name] for representation, found in numbers.items() if name in found}
