"""The outcome of a study as one table: in the terminal, as Markdown, CSV and JSON."""

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from tico_ssl.config.study import Study, Variant
from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.run_folder import Run, environment
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import console
from tico_ssl.studies.cost import Cost
from tico_ssl.studies.state import results_of

Numbers = dict[str, dict[str, dict[str, float]]]  # protocol, representation, metric


@dataclass(frozen=True)
class Measured:
    """What came out of one run."""

    seed: int
    epochs: int
    seconds: float
    images_per_second: float
    collapsed: str
    numbers: Numbers


@dataclass(frozen=True)
class Spread:
    """A number over seeds: its mean, and its sample deviation where there are several."""

    mean: float
    deviation: float | None
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value a seed."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, list(values))

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.deviation:.1f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Row:
    """A variant, over its seeds. Numbers are by protocol, metric and representation."""

    run: str
    recipe: str
    changes: dict[str, Any]
    seeds: list[int]
    seeds_planned: int
    failed: dict[str, str]
    epochs: int | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    collapsed: list[str] = field(default_factory=list)
    numbers: dict[str, dict[str, dict[str, Spread]]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether the runs collapsed, in a word, or in numbers where seeds differ."""
        if not self.collapsed or len(set(self.collapsed)) == 1:
            return self.collapsed[0] if self.collapsed else ""
        return ", ".join(f"{self.collapsed.count(word)} {word}" for word in dict.fromkeys(self.collapsed))


@dataclass(frozen=True)
class Summary:
    """All that a study found, and where it is written."""

    study: str
    description: str
    folder: Path
    budget: dict[str, Any] | None
    rows: list[Row]
    environment: dict[str, Any]

    @property
    def failures(self) -> dict[str, str]:
        """Why runs failed, by name."""
        return {name: reason for row in self.rows for name, reason in row.failed.items()}


def measured(study: Study, run: Run, seed: int, cost: Cost | None) -> Measured:
    """What came out of a run that is done. Its time is that of its steps: as they were timed alone, if they were."""
    recipe, metrics = run.recipe(), run.metrics()
    logged = [line for line in metrics if "images_per_second" in line]
    if cost is not None:
        seconds, speed = recipe.training.epochs * cost.epoch_seconds, cost.images_per_second
    else:
        seconds = training_seconds(logged, recipe.training.batch_size)
        speed = logged[-1]["step"] * recipe.training.batch_size / seconds
    numbers = {protocol: result["numbers"] for protocol, result in results_of(study, run).items()}
    return Measured(seed, recipe.training.epochs, seconds, speed, collapse_verdict(logged[-1], numbers), numbers)


def training_seconds(logged: Iterable[dict[str, Any]], batch_size: int) -> float:
    """The time of the steps alone: checkpoints and evaluations between epochs are not training."""
    seconds, before = 0.0, 0
    for line in logged:
        seconds += (line["step"] - before) * batch_size / line["images_per_second"]
        before = line["step"]
    return seconds


def collapse_verdict(last: dict[str, Any], numbers: Numbers) -> str:
    """Signs of collapse at the last step, and features beside untrained ones, in a word:

    no, or worse if the features are worse than untrained ones all the same; yes, or signs if they are better.
    """
    collapses = bool(collapse_signs(last, None))
    gain = _gain_over_untrained(numbers)
    if collapses:
        return "signs" if gain is not None and gain > 1 else "yes"
    return "worse" if gain is not None and gain < -1 else "no"


def _gain_over_untrained(numbers: Numbers) -> float | None:
    """In points of the first accuracy there is."""
    for by_representation in numbers.values():
        trained, untrained = by_representation.get("trained", {}), by_representation.get("untrained", {})
        for metric, value in trained.items():
            if metric.startswith("top1") and metric in untrained:
                return value - untrained[metric]
    return None


def row_of(variant: Variant, planned: int, runs: Sequence[Measured], failed: dict[str, str]) -> Row:
    """A row of the table: means and deviations over the seeds that are done."""
    row = Row(variant.name, variant.recipe, variant.changes, [run.seed for run in runs], planned, failed)
    if not runs:
        return row
    numbers: dict[str, dict[str, dict[str, Spread]]] = {}
    for protocol, by_representation in runs[0].numbers.items():
        metrics = dict.fromkeys(metric for metrics in by_representation.values() for metric in metrics)
        numbers[protocol] = {
            metric: {
                name: Spread.of([run.numbers[protocol][name][metric] for run in runs])
                for name in by_representation
                if metric in by_representation[name]
            }
            for metric in metrics
        }
    return Row(
        **vars(row)
        | {
            "epochs": runs[0].epochs,
            "seconds": statistics.fmean(run.seconds for run in runs),
            "images_per_second": statistics.fmean(run.images_per_second for run in runs),
            "collapsed": [run.collapsed for run in runs],
            "numbers": numbers,
        }
    )


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table that people read: of every protocol its first metric."""
    heads: dict[str, tuple[str, str]] = {}
    for row in rows:
        for protocol, metrics in row.numbers.items():
            heads.setdefault(protocol, (protocol, next(iter(metrics))))
    head = ["run", "seeds", "epochs", "seconds", "images/s"]
    head += [name for protocol, _ in heads.values() for name in (protocol, "untrained")]
    cells = []
    for row in rows:
        done = len(row.seeds)
        line = [row.run, str(done) if done == row.seeds_planned else f"{done} of {row.seeds_planned}"]
        line += ["" if value is None else f"{value:,.0f}" for value in (row.epochs, row.seconds, row.images_per_second)]
        for protocol, metric in heads.values():
            found = row.numbers.get(protocol, {}).get(metric, {})
            line += [str(found.get(name, "")) for name in ("trained", "untrained")]
        cells.append([*line, "failed" if row.failed else row.verdict])
    return [*head, "collapsed?"], cells


def as_markdown(summary: Summary) -> str:
    """The table with what a reader needs to know beside it."""
    lines = [f"# {summary.study}", "", summary.description, "", *markdown_lines(*columns(summary.rows))]
    lines += ["", _note(summary), ""]
    if summary.failures:
        lines += ["Failed:", ""] + [f"- {name}: {reason}" for name, reason in summary.failures.items()] + [""]
    return "\n".join(lines)


def markdown_lines(head: list[str], cells: list[list[str]]) -> list[str]:
    """A table in Markdown, its columns aligned for those who read it as text."""
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    left = (0, len(head) - 1)
    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    padded = [
        [text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths))]
        for line in (head, *cells)
    ]
    return [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]


def _note(summary: Summary) -> str:
    machine = summary.environment["gpu"] or summary.environment["processor"]
    budget = f" Budget: {', '.join(f'{k} {v}' for k, v in summary.budget.items())}." if summary.budget else ""
    return (
        f"Mean ± sample deviation over seeds; accuracies in per cent. Seconds and images/s are of training steps alone."
        f"{budget} {machine}, torch {summary.environment['packages']['torch']}."
    )


def as_csv(summary: Summary) -> str:
    """A line for every variant, a column for every number."""
    lines = []
    for row in summary.rows:
        line: dict[str, Any] = {"run": row.run, "recipe": row.recipe, "changes": json.dumps(row.changes)}
        line |= {"seeds": len(row.seeds), "seeds_planned": row.seeds_planned, "epochs": row.epochs}
        line |= {"seconds": row.seconds, "images_per_second": row.images_per_second, "collapsed": row.verdict}
        line |= {"failed": "; ".join(row.failed.values())}
        for protocol, metrics in row.numbers.items():
            for metric, representations in metrics.items():
                for name, spread in representations.items():
                    key = f"{protocol}_{metric}_{name}"
                    line |= {f"{key}_mean": spread.mean, f"{key}_deviation": spread.deviation}
        lines.append(line)
    text = io.StringIO()
    fields = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(summary: Summary) -> str:
    """Everything, with the value of every seed."""
    values = asdict(summary) | {"folder": str(summary.folder)}
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write(summary: Summary) -> None:
    """results.md, results.csv and results.json in the study's folder."""
    for suffix, text in (("md", as_markdown(summary)), ("csv", as_csv(summary)), ("json", as_json(summary))):
        write_atomically(summary.folder / f"results.{suffix}", text)


def show(summary: Summary) -> None:
    """The table in the terminal, and what failed."""
    head, cells = columns(summary.rows)
    table = Table()
    for name in head:
        table.add_column(name, justify="left" if name in ("run", "collapsed?") else "right")
    for line in cells:
        table.add_row(*line)
    whole = Measurement.get(console, console.options.update(max_width=1_000), table).maximum
    console.print()
    if console.is_terminal and whole <= console.width:
        console.print(table)
    else:  # a file, or a narrow window: lines that wrap rather than columns that do
        for text in markdown_lines(head, cells):
            console.print(text, markup=False)
    for name, reason in summary.failures.items():
        console.print(f"failed     {name}: {reason}", markup=False)


def summarise(
    name: str,
    study: Study,
    folder: Path,
    variants: Sequence[Variant],
    done: dict[str, list[Measured]],
    failed: dict[str, dict[str, str]],
) -> Summary:
    """Rows for all variants, with what is done of each."""
    rows = [row_of(variant, len(study.seeds), done[variant.name], failed[variant.name]) for variant in variants]
    budget = study.budget.model_dump(exclude_none=True) if study.budget else None
    return Summary(name, study.description, folder, budget, rows, environment())
