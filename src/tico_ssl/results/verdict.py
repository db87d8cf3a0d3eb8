"""Did pretraining help, and did it collapse? One rule for all who ask: `evaluate`, `compare`, `study` and `report`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.metrics import Measurement, measurements
from tico_ssl.results.record import Numbers

Results = Iterable[tuple[str, Mapping[str, Numbers]]]  # protocols, and their numbers by representation

POINTS = 1.0  # by which trained features must differ from untrained ones, in the metric's unit, to be better or worse


@dataclass(frozen=True)
class Verdict:
    """The measurement that decides, and what training added to it; above zero is better, whichever way that is."""

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
    """By the first number, among protocols and their numbers, that may decide; None where there is none."""
    for protocol, numbers in results:
        for found in measurements(protocol, numbers):
            if found.metric.verdict and found.gain is not None:
                return Verdict(found, found.gain if found.metric.better == "higher" else -found.gain)
    return None


def collapse_verdict(last: Mapping[str, float], results: Results) -> str:
    """Signs of collapse at the last step, and features beside untrained ones, in a word:

    no, or worse if the features are worse than untrained ones all the same; yes, or signs if they are better.
    """
    found = verdict(results)
    if collapse_signs(last, None):
        return "signs" if found is not None and found.helped else "yes"
    return "worse" if found is not None and found.harmed else "no"
