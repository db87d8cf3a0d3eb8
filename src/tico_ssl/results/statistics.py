"""Mean and standard deviation over repetitions and seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    def text(self, digits: int = 1) -> str:
        """Rounded text."""
        return with_deviation(self.mean, self.deviation, digits)


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
