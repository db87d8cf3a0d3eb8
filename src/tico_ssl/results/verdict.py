"""Did pretraining help, and did it collapse? One rule for `evaluate`, `compare`, `study` and `report`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.metrics import Measurement, measurements
from tico_ssl.results.record import Numbers

Results = Iterable[tuple[str, Mapping[str, Numbers]]]  # protocols, and their metrics by representation

POINTS = 1.0  # minimum difference between trained and untrained, in the metric's unit, to count as better or worse


@dataclass(frozen=True)
class Verdict:
    """The deciding metric, and the gain due to training: positive is better, whatever the metric's direction."""

    by: Measurement
    gain: float

    @property
    def helped(self) -> bool:
        """Clearly better than an untrained network."""
        return self.gain > POINTS

    @property
    def harmed(self) -> bool:
        """Clearly worse than an untrained network."""
        return self.gain < -POINTS

    def __str__(self) -> str:
        unit, text = f" {self.by.metric.unit}".rstrip(), self.by.text
        against = f"{text('untrained')}{unit} untrained"
        if "pixels" in self.by.values:
            against += f" and {text('pixels')}{unit} from raw pixels"
        word = "helped" if self.helped else "did not help"
        return f"Pretraining {word}: {self.by} {text('trained')}{unit} against {against}."


def verdict(results: Results) -> Verdict | None:
    """From the first metric that can decide; None if there is none."""
    for protocol, numbers in results:
        for found in measurements(protocol, numbers):
            if found.metric.verdict and found.gain is not None:
                return Verdict(found, found.gain if found.metric.better == "higher" else -found.gain)
    return None


def collapse_verdict(last: Mapping[str, float], results: Results) -> str:
    """Collapse in a word, from the signs at the last step and the comparison with untrained features:

    without signs no, or worse if features are worse than untrained; with signs yes, or signs if they are better.
    """
    found = verdict(results)
    if collapse_signs(last, None):
        return "signs" if found is not None and found.helped else "yes"
    return "worse" if found is not None and found.harmed else "no"
