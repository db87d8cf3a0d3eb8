"""The results of a study as one table: in the terminal, as Markdown, CSV and JSON."""

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tico_ssl.config.study import Study, Variant
from tico_ssl.results.comparison import GAIN, gain_cell, headline_of, in_a_word, meaning
from tico_ssl.results.formats import safe_cell
from tico_ssl.results.metrics import Quantity, first_of_each
from tico_ssl.results.reading import read_record
from tico_ssl.results.record import Line
from tico_ssl.results.run_folder import Run, environment
from tico_ssl.results.statistics import Spread
from tico_ssl.results.study_state import results_of
from tico_ssl.results.table import markdown_lines, print_table
from tico_ssl.results.verdict import Verdict, collapse_verdict, verdict_over_seeds
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import console
from tico_ssl.studies.cost import Cost


@dataclass(frozen=True)
class Measured:
    """Results of one run."""

    seed: int
    epochs: int
    seconds: float
    images_per_second: float
    collapsed: str
    results: dict[str, Line]
    """Lines of results.jsonl, by protocol."""

    def of(self, protocol: str, representation: str) -> dict[str, float]:
        """The metrics of a protocol for a representation."""
        found: dict[str, float] = self.results.get(protocol, {}).get("numbers", {}).get(representation, {})
        return found


@dataclass(frozen=True)
class Row:
    """A variant over its seeds. Numbers are by protocol, metric and representation."""

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
    verdict: Verdict | None = None
    """Whether pretraining helped: over the seeds, or of a single one over test images."""

    @property
    def collapse(self) -> str:
        """Whether the runs collapsed: a word, or a count where seeds differ."""
        return in_a_word(self.collapsed)

    @property
    def helped(self) -> str:
        """The verdict in a word or two."""
        return "" if self.verdict is None else self.verdict.outcome


@dataclass(frozen=True)
class Summary:
    """All results of a study, and its folder."""

    study: str
    description: str
    folder: Path
    budget: dict[str, Any] | None
    rows: list[Row]
    environment: dict[str, Any]

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of failures, by run."""
        return {name: reason for row in self.rows for name, reason in row.failed.items()}


def measured(study: Study, run: Run, seed: int, cost: Cost | None) -> Measured:
    """Results of a finished run. Its time is that of its steps, from the timing on an idle machine if there was one."""
    record = read_record(run.folder)
    seconds, speed = record.training_seconds, record.images_per_second or 0.0
    if cost is not None:
        seconds, speed = record.epochs * cost.epoch_seconds, cost.images_per_second
    results = results_of(study, run)
    collapsed = collapse_verdict(record.logged[-1] if record.logged else {}, results.values())
    return Measured(seed, record.epochs, seconds, speed, collapsed, results)


def row_of(variant: Variant, planned: int, runs: Sequence[Measured], failed: dict[str, str]) -> Row:
    """A row of the table: means and standard deviations over the finished seeds."""
    row = Row(variant.name, variant.recipe, variant.changes, [run.seed for run in runs], planned, failed)
    if not runs:
        return row
    numbers: dict[str, dict[str, dict[str, Spread]]] = {}
    for protocol, result in runs[0].results.items():
        by_representation = result["numbers"]
        metrics = dict.fromkeys(metric for metrics in by_representation.values() for metric in metrics)
        numbers[protocol] = {
            metric: {
                name: Spread.of(found)
                for name in by_representation
                if (found := [run.of(protocol, name)[metric] for run in runs if metric in run.of(protocol, name)])
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
            "verdict": verdict_over_seeds([[*run.results.values()] for run in runs]),
        }
    )


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the readable table: the first metric of every protocol."""
    shown = _shown(rows)
    head = ["run", "seeds", "epochs", "seconds", "images/s"]
    by = headline_of(shown)
    head += [name for one in shown for name in (one.protocol, "untrained", *([GAIN] if one is by else []))]
    cells = []
    for row in rows:
        done = len(row.seeds)
        line = [row.run, str(done) if done == row.seeds_planned else f"{done} of {row.seeds_planned}"]
        line += ["" if value is None else f"{value:,.0f}" for value in (row.epochs, row.seconds, row.images_per_second)]
        for one in shown:
            found = row.numbers.get(one.protocol, {}).get(one.name, {})
            line += [found[name].text(one.metric.digits) if name in found else "" for name in ("trained", "untrained")]
            line += [gain_cell(row.verdict, one).text] if one is by else []
        line += [] if by is None else [row.helped]
        cells.append([*line, "failed" if row.failed else row.collapse])
    return [*head, *([] if by is None else ["helped?"]), "collapsed?"], cells


def _shown(rows: Sequence[Row]) -> list[Quantity]:
    return first_of_each(item for row in rows for item in row.numbers.items())


def as_markdown(summary: Summary) -> str:
    """The table with its notes."""
    head, cells = columns(summary.rows)
    lines = [f"# {summary.study}", "", summary.description, "", *markdown_lines(head, cells, _left(head))]
    lines += ["", _note(summary), ""]
    if summary.failures:
        lines += ["Failed:", ""] + [f"- {name}: {reason}" for name, reason in summary.failures.items()] + [""]
    return "\n".join(lines)


def _note(summary: Summary) -> str:
    machine = summary.environment["gpu"] or summary.environment["processor"]
    budget = f" Budget: {', '.join(f'{k} {v}' for k, v in summary.budget.items())}." if summary.budget else ""
    return f"{meaning(_shown(summary.rows))}{budget} {machine}, torch {summary.environment['packages']['torch']}."


def as_csv(summary: Summary) -> str:
    """One line per variant, one column per number."""
    lines = []
    for row in summary.rows:
        line: dict[str, Any] = {"run": row.run, "recipe": row.recipe, "changes": json.dumps(row.changes)}
        line |= {"seeds": len(row.seeds), "seeds_planned": row.seeds_planned, "epochs": row.epochs}
        line |= {"seconds": row.seconds, "images_per_second": row.images_per_second, "collapsed": row.collapse}
        line |= {"helped": row.helped}
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
    writer.writerow({key: safe_cell(key) for key in fields})
    writer.writerows({key: safe_cell(v) if isinstance(v, str) else v for key, v in line.items()} for line in lines)
    return text.getvalue()


def as_json(summary: Summary) -> str:
    """Everything, with the values of every seed."""
    values = asdict(replace(summary, rows=[])) | {"folder": str(summary.folder)}
    values["rows"] = [
        asdict(replace(row, verdict=None)) | {"helped": row.helped, "verdict": str(row.verdict or "")}
        for row in summary.rows
    ]
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write(summary: Summary) -> None:
    """results.md, results.csv and results.json in the study's folder."""
    for suffix, text in (("md", as_markdown(summary)), ("csv", as_csv(summary)), ("json", as_json(summary))):
        write_atomically(summary.folder / f"results.{suffix}", text)


def show(summary: Summary) -> None:
    """Print the table, and failures."""
    head, cells = columns(summary.rows)
    console.print()
    print_table(head, cells, _left(head), [i for i, name in enumerate(head) if name in ("untrained", GAIN)])
    for name, reason in summary.failures.items():
        console.print(f"failed     {name}: {reason}")


def _left(head: Sequence[str]) -> list[int]:
    """The text columns."""
    return [i for i, name in enumerate(head) if name in ("run", "helped?", "collapsed?")]


def summarise(
    name: str,
    study: Study,
    folder: Path,
    variants: Sequence[Variant],
    done: dict[str, list[Measured]],
    failed: dict[str, dict[str, str]],
) -> Summary:
    """Rows for all variants, with their results so far."""
    rows = [row_of(variant, len(study.seeds), done[variant.name], failed[variant.name]) for variant in variants]
    budget = study.budget.model_dump(exclude_none=True) if study.budget else None
    return Summary(name, study.description, folder, budget, rows, environment())
