"""Mean, standard deviation and interval over repetitions and seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tico_ssl.results.confidence import Interval, student

DEVIATION = "_std"  # suffix of a standard deviation's name


@dataclass(frozen=True)
class Spread:
    """Mean over seeds and, for several, the sample standard deviation."""

    mean: float
    deviation: float | None
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """From one value per seed."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, list(values))

    @property
    def interval(self) -> Interval | None:
        """Student's 95 % interval of the mean: of seeds that are yet to be run. None for a single one."""
        if self.deviation is None:
            return None
        count = len(self.values)
        reach = student(count - 1) * self.deviation / math.sqrt(count)
        return self.mean - reach, self.mean + reach

    def text(self, digits: int = 1) -> str:
        """Rounded text."""
        return with_deviation(self.mean, self.deviation, digits)


def difference_of(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, Interval | None]:
    """The difference of two means over seeds, and its interval: seed by seed where both have the same (what a seed has
    in common cancels), else Welch's. None with fewer than two seeds."""
    if first.keys() == second.keys():
        paired = Spread.of([first[seed] - second[seed] for seed in first])
        return paired.mean, paired.interval
    one, other = Spread.of([*first.values()]), Spread.of([*second.values()])
    difference = one.mean - other.mean
    if one.deviation is None or other.deviation is None:
        return difference, None
    parts = [(found.deviation or 0.0) ** 2 / len(found.values) for found in (one, other)]
    reach = student(freedom_of(parts, [len(first) - 1, len(second) - 1])) * math.sqrt(sum(parts))
    return difference, (difference - reach, difference + reach)


def freedom_of(variances: Sequence[float], freedoms: Sequence[int]) -> int:
    """Degrees of freedom of a sum of variances of means (Welch and Satterthwaite), rounded down."""
    rest = sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return max(1, int(sum(variances) ** 2 / rest)) if rest else sum(freedoms)


def with_deviation(mean: float, deviation: float | None, digits: int = 1) -> str:
    """55.0, or 55.0 ± 7.1 with a standard deviation."""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def mean_and_deviation(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over repetitions, followed by its sample standard deviation under `_std`."""
    together: dict[str, float] = {}
    for name in runs[0]:
        spread = Spread.of([run[name] for run in runs])
        together[name] = spread.mean
        if spread.deviation is not None:
            together[f"{name}{DEVIATION}"] = spread.deviation
    return together
