"""The main findings in sentences: did pretraining help, did it collapse, how many dimensions are in use."""

from typing import Literal, NamedTuple

from tico_ssl.results.record import Record
from tico_ssl.results.verdict import POINTS, verdict

Tone = Literal["good", "bad", "plain"]
WAITING = 0.1  # share of the training time worth a sentence


class Sentence(NamedTuple):
    """A finding, and its tone."""

    tone: Tone
    text: str


def findings(record: Record) -> list[Sentence]:
    """What a reader should know first."""
    found = [] if record.finished else [Sentence("plain" if record.running else "bad", f"The run is {record.state}.")]
    found += [*_help(record), _collapse(record), *_rank(record)]
    share = record.waiting_seconds / record.training_seconds if record.training_seconds else 0.0
    if share > WAITING:
        found.append(Sentence("bad", f"{share:.0%} of the training time was spent waiting for images."))
    if record.bad_files:
        found.append(Sentence("bad", f"{len(record.bad_files):,} files could not be read and were left out."))
    return found


def _help(record: Record) -> list[Sentence]:
    if (decided := verdict(record.current_results.values())) is not None:
        return [Sentence("good" if decided.helped else "plain" if decided.undecided else "bad", str(decided))]
    if len(curve := record.knn_on_the_way) > 1:
        (first, before), (last, after) = curve[0], curve[-1]
        moved = "rose" if after > before else "fell" if after < before else "stayed"
        tone: Tone = "good" if after > before + POINTS else "bad"
        return [Sentence(tone, f"kNN {moved} from {before:.1f} % (epoch {first:g}) to {after:.1f} % (epoch {last:g}).")]
    return [Sentence("plain", "Whether pretraining helped has not been measured yet.")]


def _collapse(record: Record) -> Sentence:
    if not record.logged:
        return Sentence("plain", "Nothing has been logged yet.")
    if record.collapse:
        return Sentence("bad", f"Signs of collapse: {'; '.join(record.collapse)}.")
    if any("collapse" in line for line in record.warnings):
        return Sentence("bad", "Signs of collapse during training (see the warnings), but not at the last step.")
    return Sentence("good", "No sign of collapse.")


def _rank(record: Record) -> list[Sentence]:
    numbers = record.current_results.get("rankme", {}).get("numbers", {}).get("trained", {})
    if {"rankme", "width"} <= numbers.keys():
        return [
            Sentence("plain", f"Effective rank of the features: {numbers['rankme']:.0f} of {numbers['width']:.0f}.")
        ]
    ratio, dim = (record.logged[-1] if record.logged else {}).get("participation_ratio"), record.setting("method.dim")
    if ratio is not None and dim:
        return [Sentence("plain", f"Participation ratio of the covariance: {ratio:.0f} of {dim} dimensions.")]
    return []
