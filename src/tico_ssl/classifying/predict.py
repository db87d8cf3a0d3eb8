"""The classes of images, by a classifier. User errors are raised before torch is imported."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from tico_ssl.classifying.images import open_places, places_of
from tico_ssl.classifying.journal import Batch, Journal
from tico_ssl.classifying.place import classifier_file
from tico_ssl.classifying.tables import Row, require_table, require_top, write_table
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest
from tico_ssl.runtime.json_lines import write_json_lines
from tico_ssl.runtime.locks import alone_in
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    import torch

    from tico_ssl.classifying.model import ImageClassifier
    from tico_ssl.data.source import Source

FIRST = 20  # rows and bad files that are kept to be shown


@dataclass
class Predictions:
    """What was predicted: numbers of images, how many of them by an earlier command, and the first rows."""

    images: int = 0
    before: int = 0
    unreadable: int = 0
    seconds: float = 0.0
    first: list[Row] = field(default_factory=list)
    first_bad: list[tuple[str, str]] = field(default_factory=list)
    by_class: Counter[str] = field(default_factory=Counter)
    bad_file: Path | None = None

    @property
    def speed(self) -> float:
        """Images per second of this command."""
        return (self.images + self.unreadable - self.before) / max(self.seconds, 1e-9)

    def add(self, batch: Batch, rows: list[Row]) -> None:
        """Count a batch."""
        self.images += len(rows)
        self.unreadable += len(batch.bad)
        self.first += rows[: FIRST - len(self.first)]
        self.first_bad += batch.bad[: FIRST - len(self.first_bad)]
        self.by_class.update(str(row[1]) for row in rows)


def predict(
    model: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    top: int = 5,
    overwrite: bool = False,
) -> Predictions:
    """Name the likeliest classes of images, and write them as .csv, .jsonl or .parquet. The same call continues one
    that was interrupted."""
    require_top(top)
    file = classifier_file(model)
    path = None if out is None else Path(out).expanduser()
    if path is not None:
        require_table(path)
        _require_new(path, overwrite)
    places = places_of([images] if isinstance(images, str | Path) else images)

    from tico_ssl.classifying.storage import load_classifier
    from tico_ssl.features.extraction import needed_side
    from tico_ssl.runtime.device import choose_device, tune_process

    device = choose_device()
    tune_process(device)
    known = digest(file)  # before it is loaded: if it is replaced meanwhile, nobody continues with the new one
    classifier = load_classifier(file).to(device)
    backbone = classifier.backbone
    source = open_places(places, backbone.config.channels, needed_side(backbone), backbone.limits)
    work = _Work(classifier, source, device, min(top, len(classifier.classes)))
    if path is None:
        return work.counted(work.batches(0), Predictions())
    folder = path.with_name(f"{path.name}.partial")
    with alone_in(folder, f"{path}: another command writes these predictions"):
        _require_new(path, overwrite)  # again: another command may have ended since
        return _kept(work, path, folder / "journal.jsonl", known, overwrite)


def _require_new(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists: replace it with --overwrite, or choose another --out")


def _kept(work: "_Work", out: Path, kept: Path, model: str, overwrite: bool) -> Predictions:
    """By way of a journal."""
    images = work.source.fingerprint()
    header = {"model": model, "images": images, "count": len(work.source), "top": work.top}
    journal = Journal(kept, header, anew=overwrite or images is None)
    before, begun = journal.done, perf_counter()
    for batch in work.batches(journal.done):
        journal.append(batch)
    found = work.counted(journal.batches(), Predictions(before=before, seconds=perf_counter() - begun))
    bad_file = out.with_name(f"{out.name}.bad_files.jsonl")
    if found.unreadable:
        bad = (pair for batch in journal.batches() for pair in batch.bad)
        write_json_lines(bad_file, ({"file": name, "reason": reason} for name, reason in bad))
        found.bad_file = bad_file
    else:
        bad_file.unlink(missing_ok=True)
    write_table(out, work.top, (work.rows(batch) for batch in journal.batches()))  # last: it says that all is done
    kept.unlink()
    return found


@dataclass(frozen=True)
class _Work:
    """A classifier, images, and how many classes to name."""

    model: "ImageClassifier"
    source: "Source"
    device: "torch.device"
    top: int

    def batches(self, start: int) -> Iterator[Batch]:
        """Predictions from an image on, which begins a batch, so that batches do not depend on where one begins."""
        import torch

        from tico_ssl.classifying.model import rankings
        from tico_ssl.classifying.scores import probability_batches
        from tico_ssl.features.batches import BATCH

        rest = self.source.subset(torch.arange(start, len(self.source))) if start else self.source
        done = start
        if start < len(self.source):
            for probabilities, places in probability_batches(self.model, rest, self.device, "predicting"):
                end = min(len(self.source), start + (places[-1] // BATCH + 1) * BATCH)
                files = [start + place for place in places]
                rows = [(self._file(at), ranking) for at, ranking in zip(files, rankings(probabilities, self.top))]
                yield Batch(done, end, rows, self._bad(set(range(done, end)) - set(files)))
                done = end
        if done < len(self.source):  # nothing after this can be read
            yield Batch(done, len(self.source), [], self._bad(set(range(done, len(self.source)))))

    def counted(self, batches: Iterator[Batch], found: Predictions) -> Predictions:
        """What there is in batches; a UserError if no image could be read."""
        begun = perf_counter()
        for batch in batches:
            found.add(batch, self.rows(batch))
        found.seconds = found.seconds or perf_counter() - begun
        if not found.images:
            name, reason = found.first_bad[0]
            raise UserError(f"none of the {counted(found.unreadable, 'image')} can be read, such as {name} ({reason})")
        return found

    def rows(self, batch: Batch) -> list[Row]:
        """The rows of a table."""
        names = [printable(name) for name in self.model.classes]
        return [[file, *(part for at, p in ranking for part in (names[at], p))] for file, ranking in batch.rows]

    def _file(self, place: int) -> str:
        """The path of an image as it was found, or its name."""
        path = self.source.names(place) if self.source.files is None else str(self.source.files(place))
        return printable(path)

    def _bad(self, places: set[int]) -> list[tuple[str, str]]:
        """Files that could not be read, with reasons."""
        from tico_ssl.data.bad_files import reason_unread

        return [(self._file(place), printable(reason_unread(self.source, place))) for place in sorted(places)]
