"""The main findings in sentences: did pretraining help, did it collapse, how many dimensions are in use."""

import shlex
from typing import Literal, NamedTuple

from tico_ssl.report.names import full_name, within
from tico_ssl.results.confidence import unpaired_interval
from tico_ssl.results.record import Record, duration
from tico_ssl.results.verdict import Verdict, verdict
from tico_ssl.runtime.locks import LOCK
from tico_ssl.runtime.wording import counted

Tone = Literal["good", "bad", "plain"]
WAITING = 0.1  # share of the training time worth a sentence


class Sentence(NamedTuple):
    """A finding, its tone, and a command that follows from it."""

    tone: Tone
    text: str
    command: str = ""


def findings(record: Record) -> list[Sentence]:
    """What a reader should know first."""
    found = [] if record.finished else [progress(record)]
    found += [*_help(record), _collapse(record), *_rank(record)]
    share = record.waiting_seconds / record.training_seconds if record.training_seconds else 0.0
    if share > WAITING:
        found.append(Sentence("bad", f"{share:.0%} of the training time was spent waiting for images."))
    if record.bad_files:
        found.append(Sentence("bad", f"Left out: {counted(len(record.bad_files), 'file')} that could not be read."))
    return found


def decided(record: Record) -> Verdict | None:
    """The verdict on a run by its current results."""
    return verdict(record.current_results.values())


def progress(record: Record) -> Sentence:
    """How far a run has come, and if it has stopped, how to go on with it."""
    if record.finished or (record.running and not _ended(record)):
        return Sentence("plain", f"The run is {record.state}.")
    ago = duration(max(0.0, record.now - record.last_sign))
    where = f"epoch {record.epoch:.3g} of {record.epochs}" if record.metrics else "before its first logged step"
    step = f", step {record.metrics[-1]['step']:,}" if record.metrics else ""
    saved = record.run.checkpoint_file.is_file()
    kept = "from its last checkpoint" if saved else "from the start, since it has no checkpoint"
    text = f"The run stopped: {where}{step}, last activity {ago} ago. To resume it {kept}:"
    file, folder = (shlex.quote(str(path)) for path in (record.run.recipe_file, record.run.folder))
    return Sentence("bad", text, f"tico pretrain {file} --out {folder} --resume")


def _ended(record: Record) -> bool:
    """Whether the training has released its folder: it writes its name into the lock, and empties it at the end."""
    lock = record.run.folder / LOCK
    return lock.is_file() and lock.stat().st_size == 0


def _help(record: Record) -> list[Sentence]:
    if (found := decided(record)) is not None:
        said = found.sentence(within(full_name(found.by)))
        return [Sentence("good" if found.helped else "plain" if found.undecided else "bad", said)]
    if len(curve := record.knn_on_the_way) > 1:
        (first, before), (last, after) = curve[0], curve[-1]
        moved = "rose" if after > before else "fell" if after < before else "stayed"
        said = f"kNN accuracy {moved} from {before:.1f} % (epoch {first:g}) to {after:.1f} % (epoch {last:g})"
        if (images := record.knn_images) is None:
            return [Sentence("plain", f"{said}.")]
        low, high = unpaired_interval(after / 100, images, before / 100, images)
        if low <= 0 <= high:
            return [Sentence("plain", f"{said}, which may be chance with {counted(images, 'test image')}.")]
        return [Sentence("good" if low > 0 else "bad", f"{said}.")]
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
