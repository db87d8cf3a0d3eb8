"""Mean and standard deviation over repetitions and seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEVIATION = "_std"  # behind the name of a number whose standard deviation this is


@dataclass(frozen=True)
class Spread:
    """A number over seeds: its mean, and its sample standard deviation where there are several."""

    mean: float
    deviation: float | None
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value a seed."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, list(values))

    def text(self, digits: int = 1) -> str:
        """As people read it."""
        return with_deviation(self.mean, self.deviation, digits)


def with_deviation(mean: float, deviation: float | None, digits: int = 1) -> str:
    """55.0, or 55.0 ± 7.1 where there is a deviation."""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def mean_and_deviation(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over repetitions and, behind it under `_std`, the standard deviation of one of them."""
    together: dict[str, float] = {}
    for name in runs[0]:
        spread = Spread.of([run[name] for run in runs])
        together[name] = spread.mean
        if spread.deviation is not None:
            together[f"{name}{DEVIATION}"] = spread.deviation
    return together
