"""Several runs as one table: in the terminal, as Markdown, CSV or LaTeX, and in the report."""

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tico_ssl.report.page import Cell
from tico_ssl.report.reading import failures, is_study, read_records
from tico_ssl.report.record import Record, measured
from tico_ssl.results.run_folder import flattened
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.files import write_atomically
from tico_ssl.studies.table import Spread, collapse_verdict, markdown_lines

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
ON_THE_WAY = "knn_top1_k20"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone: one row."""

    name: str
    records: list[Record]

    @property
    def first(self) -> Record:
        """The run whose recipe stands for all."""
        return self.records[0]

    def spread(self, value: Callable[[Record], float | None]) -> Spread | None:
        """A number over the runs that have it."""
        found = [number for record in self.records if (number := value(record)) is not None]
        return Spread.of(found) if found else None

    @property
    def seconds(self) -> Spread | None:
        """Of training steps."""
        return self.spread(lambda record: record.cost[0] if record.cost else None)

    def number(self, protocol: str, metric: str, representation: str = "trained") -> Spread | None:
        """A number of an evaluation over the seeds that have been judged."""
        return self.spread(
            lambda record: (
                record.current_results.get(protocol, {}).get("numbers", {}).get(representation, {}).get(metric)
            )
        )


@dataclass(frozen=True)
class Comparison:
    """Groups of runs as a table, and what a reader has to know about it."""

    groups: list[Group]
    head: list[str]
    rows: list[list[Cell]]
    notes: list[str]
    metrics: dict[str, str] = field(default_factory=dict)
    """Of each protocol in the table, the metric that is shown."""

    def differing_settings(self) -> dict[str, list[Any]]:
        """Keys in which recipes differ, with the value of each group; None where a recipe has no such key."""
        settings = [recipe_settings(group.first) for group in self.groups]
        keys = dict.fromkeys(key for found in settings for key in found)
        values = {key: [found.get(key) for found in settings] for key in keys}
        return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def compare(
    runs: Sequence[str | Path], format: str | None = None, out: str | Path | None = None
) -> tuple[Comparison, str]:
    """The table of some runs, or of the runs of studies, and its text; written to `out` if that is given. Without a
    format the file's suffix says which: .md, .csv or .tex."""
    by_suffix = {".md": "markdown", ".csv": "csv", ".tex": "latex"}
    chosen = format or (by_suffix.get(Path(out).suffix, "markdown") if out is not None else "markdown")
    if chosen not in FORMATS:
        raise UserError(f"no format is called '{chosen}'{suggestion(chosen, FORMATS)}")
    comparison = read_comparison(runs)
    text = FORMATS[chosen](comparison)
    if out is not None:
        path = Path(out).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return comparison, text


def comparison_of(records: Sequence[Record], failed: Mapping[str, str] | None = None) -> Comparison:
    """Runs of one recipe are a row; of every protocol its first metric is shown. `failed`: reasons by run."""
    groups = grouped(records)
    metrics: dict[str, str] = {}
    for record in records:
        for protocol, result in record.current_results.items():
            for metric, _, _ in measured(result)[:1]:
                metrics.setdefault(protocol, metric)
    head = ["run", "method", "seeds", "epochs", "seconds", "images/s"]
    if not metrics and any(record.judged_on_the_way for record in records):
        head.append("kNN on the way")
    head += [name for protocol, metric in metrics.items() for name in (f"{protocol} {metric}", "untrained")]
    rows = [_row(group, metrics, "kNN on the way" in head) for group in groups]
    notes = _notes(groups, metrics) + [f"{name} failed: {reason}" for name, reason in (failed or {}).items()]
    return Comparison(groups, [*head, "collapsed?"], rows, notes, metrics)


def read_comparison(folders: Sequence[str | Path]) -> Comparison:
    """The comparison of runs and of the runs of studies."""
    failed = {name: reason for folder in folders if is_study(folder) for name, reason in failures(folder).items()}
    return comparison_of(read_records(folders), failed)


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs whose recipes differ in nothing but the seed belong together."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(json.dumps(recipe_settings(record), sort_keys=True, default=str), []).append(record)
    names = [_name(members) for members in found.values()]
    folders = [members[0].run.folder.resolve() for members in found.values()]
    return [
        Group(f"{folder.parent.name}/{name}" if names.count(name) > 1 else name, members)
        for name, folder, members in zip(names, folders, found.values())
    ]


def recipe_settings(record: Record) -> dict[str, Any]:
    """The recipe as keys and values, without what does not decide a result or is expected to differ."""
    silent = ("description", "training.seed", "training.log_every_steps", "training.workers", "training.checkpoint")
    return {key: value for key, value in flattened(record.recipe).items() if not key.startswith(silent)}


def _name(members: list[Record]) -> str:
    name = members[0].name
    return re.sub(r"[-_.]?seed[-_]?\d+$", "", name) or name if len(members) > 1 else name


def _row(group: Group, metrics: dict[str, str], on_the_way: bool) -> list[Cell]:
    record = group.first
    done = sum(member.finished for member in group.records)
    seeds = str(done) if done == len(group.records) else f"{done} of {len(group.records)}"
    cells = [Cell(group.name), Cell(str(record.setting("method.name", ""))), Cell(seeds, float(done))]
    cells.append(_cell(group.spread(lambda member: member.epoch), "{:.4g}"))
    cells.append(_cell(group.seconds, "{:,.0f}"))
    cells.append(_cell(group.spread(lambda member: member.cost[1] if member.cost else None), "{:,.0f}"))
    if on_the_way:
        cells.append(_cell(group.spread(_last_knn)))
    for protocol, metric in metrics.items():
        cells += [_cell(group.number(protocol, metric, name)) for name in ("trained", "untrained")]
    words = [_collapsed(member) for member in group.records if member.logged]
    text = words[0] if len(set(words)) == 1 else ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words))
    return [*cells, Cell(text)]


def _cell(spread: Spread | None, form: str | None = None) -> Cell:
    if spread is None:
        return Cell("")
    return Cell(str(spread) if form is None else form.format(spread.mean), spread.mean, spread.deviation)


def _last_knn(record: Record) -> float | None:
    found = [line[ON_THE_WAY] for line in record.judged_on_the_way if ON_THE_WAY in line]
    return found[-1] if found else None


def _collapsed(record: Record) -> str:
    numbers = {protocol: result["numbers"] for protocol, result in record.current_results.items()}
    return collapse_verdict(record.logged[-1], numbers)


def _notes(groups: Sequence[Group], metrics: dict[str, str]) -> list[str]:
    notes = ["Mean ± sample deviation over seeds; accuracies in per cent. Seconds are those of training steps alone."]
    records = [record for group in groups for record in group.records]
    for record in records:
        if not record.finished:
            notes.append(f"{record.name} is {record.state}.")
        elif record.results and not record.current_results:
            notes.append(f"{record.name}: its results are of an earlier checkpoint: evaluate it again.")
    for what in ("settings", "data"):
        if unlike := [protocol for protocol in metrics if _differ(records, protocol, what)]:
            words = f"not all runs were judged with the same {what}, so these numbers do not quite compare."
            notes.append(f"{', '.join(unlike)}: {words}")
    for protocol in metrics:
        missing = [record.name for record in records if protocol not in record.current_results]
        if missing:
            notes.append(f"{protocol}: not measured for {_some(missing)}.")
    machines = {json.dumps([r.environment.get("gpu"), r.environment.get("processor")]) for r in records}
    if len(machines) > 1:
        notes.append("Runs were made on different machines, so seconds and images/s do not compare.")
    if not metrics:
        notes.append("No run has been evaluated: `tico evaluate RUN knn linear rankme`.")
    return notes


def _differ(records: Sequence[Record], protocol: str, what: str) -> bool:
    results = [record.current_results[protocol] for record in records if protocol in record.current_results]
    return any(result.get(what) != results[0].get(what) for result in results)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def as_markdown(comparison: Comparison) -> str:
    """A table in Markdown, aligned for those who read it as text, with its notes."""
    cells = [[cell.text.replace("|", "\\|").replace("\n", " ") for cell in row] for row in comparison.rows]
    lines = markdown_lines(comparison.head, cells)
    return "\n".join([*lines, "", *(f"- {note}" for note in comparison.notes), ""])


def as_csv(comparison: Comparison) -> str:
    """A line for every row. Numbers as they are, their deviations in columns of their own."""
    several = [any(row[i].deviation is not None for row in comparison.rows) for i in range(len(comparison.head))]
    before = ""
    head = []
    for name, spread in zip(comparison.head, several):
        before = name if name != "untrained" else f"{before} untrained"
        head += [before, f"{before} deviation"] if spread else [before]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in comparison.rows:
        line: list[Any] = []
        for cell, spread in zip(row, several):
            line.append(cell.text if cell.value is None else cell.value)
            line += [cell.deviation] if spread else []
        writer.writerow(line)
    return text.getvalue()


def as_latex(comparison: Comparison) -> str:
    """A tabular for the package booktabs."""
    columns = "".join("l" if _is_text(comparison, i) else "r" for i in range(len(comparison.head)))
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_line(comparison.head), r"\midrule"]
    lines += [_latex_line([cell.text for cell in row]) for row in comparison.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines + [f"% {note}" for note in comparison.notes]) + "\n"


def _is_text(comparison: Comparison, column: int) -> bool:
    return all(row[column].value is None for row in comparison.rows)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(cell) for cell in cells) + r" \\"


def latex(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(LATEX.get(letter, letter) for letter in text.replace("\n", " "))


FORMATS: dict[str, Callable[[Comparison], str]] = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}


def show(comparison: Comparison) -> None:
    """The table in the terminal: as columns where they fit, else as Markdown."""
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from tico_ssl.runtime.progress import console

    table = Table()
    for column, name in enumerate(comparison.head):
        table.add_column(Text(name), justify="left" if _is_text(comparison, column) else "right")
    for row in comparison.rows:
        table.add_row(*(Text(cell.text) for cell in row))
    whole = Measurement.get(console, console.options.update(max_width=1_000), table).maximum
    if not console.is_terminal or whole > console.width:
        console.print(as_markdown(comparison), markup=False, end="")
        return
    console.print(table)
    for note in comparison.notes:
        console.print(f"- {note}", markup=False)
