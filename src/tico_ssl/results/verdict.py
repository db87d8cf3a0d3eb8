"""Did pretraining help, and did it collapse? One rule for `evaluate`, `compare`, `study` and `report`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.metrics import Measurement, measurements
from tico_ssl.results.record import Numbers

Results = Iterable[tuple[str, Mapping[str, Numbers]]]  # protocols, and their metrics by representation

WORDS = {"initial": "of the weights it started from", "untrained": "untrained", "pixels": "from raw pixels"}
POINTS = 1.0  # minimum difference between trained and the reference, in the metric's unit, to count as better or worse


@dataclass(frozen=True)
class Verdict:
    """The deciding metric, the column that counts, and the gain over it: positive is better, whatever the metric's
    direction."""

    by: Measurement
    gain: float
    reference: str = "untrained"

    @property
    def helped(self) -> bool:
        """Clearly better than the reference."""
        return self.gain > POINTS

    @property
    def harmed(self) -> bool:
        """Clearly worse than the reference."""
        return self.gain < -POINTS

    def __str__(self) -> str:
        unit = f" {self.by.metric.unit}".rstrip()
        order = dict.fromkeys([self.reference, *(name for name in self.by.values if name not in ("trained", "pixels"))])
        values = {name: f"{self.by.text(name)}{unit} {WORDS.get(name, f'of {name}')}" for name in order}
        if len(order) > 1:
            values[self.reference] += " (which counts)"
        if "pixels" in self.by.values:
            values["pixels"] = f"{self.by.text('pixels')}{unit} {WORDS['pixels']}"
        word = "helped" if self.helped else "did not help"
        return f"Pretraining {word}: {self.by} {self.by.text('trained')}{unit} against {_listed([*values.values()])}."


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def verdict(results: Results, reference: str | None = None) -> Verdict | None:
    """From the first metric that can decide; None if there is none. The reference is by default what the run started
    from: given weights, else untrained ones."""
    for protocol, numbers in results:
        for found in measurements(protocol, numbers):
            column = reference or found.reference
            gain = None if column is None else found.gain_over(column)
            if found.metric.verdict and column is not None and gain is not None:
                return Verdict(found, gain if found.metric.better == "higher" else -gain, column)
    return None


def collapse_verdict(last: Mapping[str, float], results: Results) -> str:
    """Collapse in a word, from the signs at the last step and the comparison with untrained features:

    without signs no, or worse if features are worse than untrained; with signs yes, or signs if they are better.
    """
    found = verdict(results, "untrained")
    if collapse_signs(last, None):
        return "signs" if found is not None and found.helped else "yes"
    return "worse" if found is not None and found.harmed else "no"
