"""The run in sentences: did pretraining help, did it collapse, how many dimensions are in use."""

from typing import Literal, NamedTuple

from tico_ssl.report.record import Record, measured

Tone = Literal["good", "bad", "plain"]
HELPED = 1.0  # points of accuracy above an untrained network that count as help
WAITING = 0.1  # share of the training time without images that is worth a sentence


class Sentence(NamedTuple):
    """A finding, and whether it is welcome."""

    tone: Tone
    text: str


def verdict(record: Record) -> list[Sentence]:
    """What a person should know first."""
    found = [] if record.finished else [Sentence("plain" if record.running else "bad", f"The run is {record.state}.")]
    found += [*_help(record), _collapse(record), *_rank(record)]
    share = record.waiting_seconds / record.training_seconds if record.training_seconds else 0.0
    if share > WAITING:
        found.append(Sentence("bad", f"{share:.0%} of the training time was spent waiting for images."))
    if record.bad_files:
        found.append(Sentence("bad", f"{len(record.bad_files):,} files could not be read and were left out."))
    return found


def _help(record: Record) -> list[Sentence]:
    for protocol, result in record.current_results.items():
        for metric, values, _ in measured(result):
            if metric.startswith("top1") and {"trained", "untrained"} <= values.keys():
                trained, untrained = values["trained"], values["untrained"]
                better = trained > untrained + HELPED
                word = "helped" if better else "did not help"
                against = f"against {untrained:.1f} % untrained"
                if "pixels" in values:
                    against += f" and {values['pixels']:.1f} % from raw pixels"
                tone: Tone = "good" if better else "bad"
                return [Sentence(tone, f"Pretraining {word}: {protocol} {metric} {trained:.1f} % {against}.")]
    curve = [(line["epoch"], line["knn_top1_k20"]) for line in record.judged_on_the_way if "knn_top1_k20" in line]
    if len(curve) > 1:
        (first, before), (last, after) = curve[0], curve[-1]
        tone = "good" if after > before + HELPED else "bad"
        moved = "rose" if after > before else "fell" if after < before else "stayed"
        return [Sentence(tone, f"kNN {moved} from {before:.1f} % (epoch {first:g}) to {after:.1f} % (epoch {last:g}).")]
    return [Sentence("plain", "Whether pretraining helped has not been measured yet.")]


def _collapse(record: Record) -> Sentence:
    if not record.logged:
        return Sentence("plain", "Nothing has been logged yet.")
    if record.collapse:
        return Sentence("bad", f"Signs of collapse: {'; '.join(record.collapse)}.")
    if any("collapse" in line for line in record.warnings):
        return Sentence("bad", "It looked like collapse on the way (see the warnings); the last step does not.")
    return Sentence("good", "No sign of collapse.")


def _rank(record: Record) -> list[Sentence]:
    numbers = record.current_results.get("rankme", {}).get("numbers", {}).get("trained", {})
    if {"rankme", "width"} <= numbers.keys():
        return [
            Sentence("plain", f"Effective rank of the features: {numbers['rankme']:.0f} of {numbers['width']:.0f}.")
        ]
    ratio, dim = (record.logged[-1] if record.logged else {}).get("participation_ratio"), record.setting("method.dim")
    if ratio is not None and dim:
        return [Sentence("plain", f"The covariance fills about {ratio:.0f} of {dim} directions.")]
    return []
