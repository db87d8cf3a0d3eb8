"""Several runs in one table: a row per recipe, mean and standard deviation over its seeds."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tico_ssl.results.formats import FORMATS
from tico_ssl.results.metrics import USUAL, Quantity, all_of_each, first_of_each
from tico_ssl.results.ranking import Contender, lead
from tico_ssl.results.reading import failures, is_study, read_records, runs_among, some
from tico_ssl.results.record import SEEN, Numbers, Record
from tico_ssl.results.run_folder import MAY_CHANGE, flattened
from tico_ssl.results.statistics import Spread
from tico_ssl.results.table import Cell, Sheet, print_table, with_interval
from tico_ssl.results.verdict import Verdict, collapse_verdict, images_tested, in_order, rank, verdict_over_seeds
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import console

ONLINE_KNN = "online kNN"
GAIN = "gain"
SEED = "training.seed"
COMPARABLE = ("settings", "data")  # of an evaluation, without which numbers do not compare


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, which differ in their seed: one row."""

    name: str
    records: list[Record]

    @property
    def first(self) -> Record:
        """The run whose recipe represents the group."""
        return self.records[0]

    @cached_property
    def by_seed(self) -> dict[int, Record]:
        """One run of each seed, the most complete one: a copy or a repeat of a run is no independent sample."""
        found: dict[int, Record] = {}
        for record in self.records:
            seed = _seed(record)
            found[seed] = max(found.get(seed, record), record, key=lambda one: (one.finished, len(one.current_results)))
        return found

    @property
    def repeats(self) -> dict[str, list[str]]:
        """Names of the other runs, by that of the run of their seed."""
        found: dict[str, list[str]] = {}
        for record in self.records:
            if (chosen := self.by_seed[_seed(record)]) is not record:
                full = chosen.name == record.name
                of, name = (
                    f"{one.run.folder.parent.name}/{one.name}" if full else one.name for one in (chosen, record)
                )
                found.setdefault(of, []).append(name)
        return found

    def spread(self, value: Callable[[Record], float | None]) -> Spread | None:
        """Mean and standard deviation over the seeds that have a value."""
        found = [number for record in self.by_seed.values() if (number := value(record)) is not None]
        return Spread.of(found) if found else None

    @property
    def seconds(self) -> Spread | None:
        """Time of training steps."""
        return self.spread(lambda record: record.cost[0] if record.cost else None)

    @property
    def verdict(self) -> Verdict | None:
        """Did pretraining help: over its seeds, or over test images."""
        return verdict_over_seeds([[*record.current_results.values()] for record in self.by_seed.values()])

    def contender(self, by: Quantity) -> Contender | None:
        """The group as one of several to be ranked by a metric; None if it was not measured."""
        lines = {
            seed: line
            for seed, record in self.by_seed.items()
            if (line := record.current_results.get(by.protocol)) is not None
            and by.name in line["numbers"].get("trained", {})
        }
        by_seed = {seed: line["numbers"]["trained"][by.name] for seed, line in lines.items()}
        return Contender(self.name, by_seed, images_tested(next(iter(lines.values())))) if lines else None

    def number(self, protocol: str, metric: str, representation: str = "trained") -> Spread | None:
        """A metric of an evaluation over the seeds that have been evaluated."""
        return self.spread(
            lambda record: (
                record.current_results.get(protocol, {}).get("numbers", {}).get(representation, {}).get(metric)
            )
        )


@dataclass(frozen=True)
class Comparison(Sheet):
    """Groups of runs as a table."""

    groups: list[Group]
    shown: list[Quantity]
    left_out: int = 0
    """Metrics of these protocols that are not in the table."""

    @property
    def headline(self) -> Quantity | None:
        """The metric that ranks the runs, if there is one."""
        return headline_of(self.shown)

    def differing_settings(self) -> dict[str, list[Any]]:
        """Recipe keys that differ, with the value of each group; None where a recipe has no such key."""
        settings = [recipe_settings(group.first) for group in self.groups]
        keys = dict.fromkeys(key for found in settings for key in found)
        values = {key: [found.get(key) for found in settings] for key in keys}
        return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def compare(
    runs: Sequence[str | Path], format: str | None = None, out: str | Path | None = None, every: bool = False
) -> tuple[Comparison, str]:
    """The table of runs, or of the runs of studies, and its text, also written to `out` if given. The default format
    follows from the suffix: .md, .csv or .tex. Of each protocol it has the first metric, or `every` one. What is no run
    is passed over."""
    by_suffix = {".md": "markdown", ".csv": "csv", ".tex": "latex"}
    chosen = format or (by_suffix.get(Path(out).suffix, "markdown") if out is not None else "markdown")
    if chosen not in FORMATS:
        raise UserError(f"no format is called '{chosen}'{suggestion(chosen, FORMATS)}")
    comparison = read_comparison(runs_among(runs), every)
    text = FORMATS[chosen](comparison)
    if out is not None:
        path = Path(out).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return comparison, text


def comparison_of(
    records: Sequence[Record], failed: Mapping[str, str] | None = None, every: bool = False
) -> Comparison:
    """One row per recipe, with the first metric of every protocol, or `every` one. `failed`: reasons by run."""
    groups = grouped(records)
    results = [(protocol, numbers) for record in records for protocol, numbers in record.numbers]
    names = [(protocol, found) for protocol, numbers in results for found in numbers.values()]
    names.sort(key=lambda item: in_order(item[0]))
    known = all_of_each(names)
    shown = known if every else first_of_each(names)
    columns = {one.protocol: _columns(one.protocol, results) for one in shown}
    head = ["run", "method", "seeds", "epochs", "seconds", "images/s"]
    if on_the_way := not shown and any(record.knn_on_the_way for record in records):
        head.append(ONLINE_KNN)
    beside: list[int] = []
    by = headline_of(shown)
    for one in shown:
        others = [*columns[one.protocol][1:], *([GAIN] if one is by else [])]
        beside += range(len(head) + 1, len(head) + 1 + len(others))
        head += [str(one), *others]
    if by is not None:
        head.append("helped?")
    rows = [_row(group, shown, columns, on_the_way) for group in groups]
    notes = _notes(records, shown, groups) + [f"{name} failed: {reason}" for name, reason in (failed or {}).items()]
    return Comparison([*head, "collapsed?"], rows, notes, groups, shown, len(known) - len(shown), beside=beside)


def _columns(protocol: str, results: Sequence[tuple[str, Mapping[str, Numbers]]]) -> list[str]:
    """What a protocol was measured on, in any run, beside the trained backbone; raw pixels take too much room."""
    found = dict.fromkeys(name for one, numbers in results if one == protocol for name in numbers)
    first = [name for name in ("initial", "untrained") if name in found]
    return ["trained", *dict.fromkeys([*first, *(name for name in found if name not in ("trained", "pixels"))])]


def read_comparison(folders: Sequence[str | Path], every: bool = False) -> Comparison:
    """The comparison of runs and of the runs of studies."""
    failed = {name: reason for folder in folders if is_study(folder) for name, reason in failures(folder).items()}
    return comparison_of(read_records(folders), failed, every)


def grouped(records: Sequence[Record]) -> list[Group]:
    """Groups of runs whose recipes differ only in the seed."""
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
    """The recipe as flat keys and values, without those that do not affect results, and without the seed."""
    silent = (*MAY_CHANGE, SEED)
    return {key: value for key, value in flattened(record.recipe).items() if not key.startswith(silent)}


def _seed(record: Record) -> int:
    """The seed of a run. Those of damaged recipes, which have none, count as one."""
    seed = record.setting(SEED)
    return seed if isinstance(seed, int) else -1


def _name(members: list[Record]) -> str:
    name = members[0].name
    return re.sub(r"[-_.]?seed[-_]?\d+$", "", name) or name if len(members) > 1 else name


def _row(group: Group, shown: Sequence[Quantity], columns: Mapping[str, Sequence[str]], on_the_way: bool) -> list[Cell]:
    record = group.first
    members = group.by_seed.values()
    done = sum(member.finished for member in members)
    seeds = str(done) if done == len(members) else f"{done} of {len(members)}"
    cells = [Cell(group.name), Cell(str(record.setting("method.name", ""))), Cell(seeds, float(done))]
    cells.append(_rounded(group.spread(lambda member: member.epoch), ".4g"))
    cells.append(_rounded(group.seconds, ",.0f"))
    cells.append(_rounded(group.spread(lambda member: member.cost[1] if member.cost else None), ",.0f"))
    if on_the_way:
        cells.append(_cell(group.spread(_last_knn)))
    by, judged = headline_of(shown), group.verdict
    for one in shown:
        spreads = (group.number(one.protocol, one.name, name) for name in columns[one.protocol])
        cells += [_cell(spread, one.metric.digits) for spread in spreads]
        cells += [gain_cell(judged, one)] if one is by else []
    if by is not None:
        cells.append(Cell("" if judged is None else judged.outcome))
    words = [
        collapse_verdict(member.logged[-1], member.current_results.values()) for member in members if member.logged
    ]
    return [*cells, Cell(in_a_word(words))]


def in_a_word(words: Sequence[str]) -> str:
    """The verdict that all seeds share, or a count of each."""
    different = dict.fromkeys(words)
    return "".join(different) if len(different) < 2 else ", ".join(f"{words.count(w)} {w}" for w in different)


def headline_of(shown: Sequence[Quantity]) -> Quantity | None:
    """Of the metrics that may decide, the one that does."""
    return min((one for one in shown if one.metric.verdict), key=rank, default=None)


def gain_cell(judged: Verdict | None, by: Quantity) -> Cell:
    """The difference that the verdict is about, with its interval; empty if another metric decided."""
    if judged is None or str(judged.by) != str(by):
        return Cell("")
    text = with_interval(judged.difference, judged.difference_interval, by.metric.digits)
    return Cell(text, judged.difference, interval=judged.difference_interval)


def _cell(spread: Spread | None, digits: int = 1) -> Cell:
    return Cell("") if spread is None else Cell(spread.text(digits), spread.mean, spread.deviation)


def _rounded(spread: Spread | None, form: str) -> Cell:
    return Cell("") if spread is None else Cell(format(spread.mean, form), spread.mean, spread.deviation)


def _last_knn(record: Record) -> float | None:
    return record.knn_on_the_way[-1][1] if record.knn_on_the_way else None


def _notes(records: Sequence[Record], shown: Sequence[Quantity], groups: Sequence[Group]) -> list[str]:
    notes = [meaning(shown)]
    for record in records:
        notes += [f"{record.name}: {what}." for what in record.damage]
        if not record.finished:
            notes.append(f"{record.name} is {record.state}.")
        elif record.results and not record.current_results:
            notes.append(f"{record.name}: its results belong to an earlier checkpoint: evaluate it again.")
    for group in groups:
        for of, others in group.repeats.items():
            notes.append(f"{some(others)}: of the same recipe and seed as {of}, so not counted as further seeds.")
    protocols = list(dict.fromkeys(one.protocol for one in shown))
    if (by := headline_of(shown)) is not None and not any(_differ(records, by.protocol, w) for w in COMPARABLE):
        found = lead(by, [one for group in groups if (one := group.contender(by)) is not None])
        notes += [] if found is None else [found]
    for what in COMPARABLE:
        if unlike := [protocol for protocol in protocols if _differ(records, protocol, what)]:
            words = f"not all runs were evaluated with the same {what}, so these numbers are not strictly comparable."
            notes.append(f"{', '.join(unlike)}: {words}")
    missing: dict[str, list[str]] = {}
    for protocol in protocols:
        names = [record.name for record in records if protocol not in record.current_results]
        missing.setdefault(some(names), []).append(protocol)
    notes += [f"{', '.join(unmeasured)}: not measured for {names}." for names, unmeasured in missing.items() if names]
    machines = {json.dumps([r.environment.get("gpu"), r.environment.get("processor")]) for r in records}
    if len(machines) > 1:
        notes.append("Runs were made on different machines, so seconds and images/s are not comparable.")
    if not shown:
        notes.append(f"No run has been evaluated: `tico evaluate RUN {' '.join(USUAL)}`.")
    return notes


def meaning(shown: Sequence[Quantity]) -> str:
    """What the numbers of a table mean, and their units."""
    units: dict[str, list[str]] = {}
    for one in shown:
        if one.metric.unit:
            alike = all(other.metric.unit == one.metric.unit for other in shown if other.protocol == one.protocol)
            units.setdefault(one.metric.unit, []).append(one.protocol if alike else str(one))
    words = "".join(f"; {', '.join(dict.fromkeys(protocols))} in {unit}" for unit, protocols in units.items())
    text = f"Mean ± sample standard deviation over seeds{words}. Seconds and images/s count training steps only."
    if (by := headline_of(shown)) is not None:
        over = "over seeds, of one or two over test images"
        text += f" {GAIN}: {by} over what a run started from [95 % interval {over}], by which it helped or not."
    return " ".join([text, *_directions(shown)])


def _directions(shown: Sequence[Quantity]) -> list[str]:
    """Which way is better, of metrics where it is not higher."""
    said = {"lower": "Lower is better", "near 1": "Nearer 1 is better", None: "Neither way is better"}
    found = {way: [str(one) for one in shown if one.metric.better == way] for way in said}
    return [f"{said[way]}: {', '.join(names)}." for way, names in found.items() if names]


def _differ(records: Sequence[Record], protocol: str, what: str) -> bool:
    results = [record.current_results[protocol] for record in records if protocol in record.current_results]
    found = [dict(result.get(what) or {}) for result in results]
    if what == "data":  # tables there are what was found in the images, or other models: neither changes the images
        found = [{key: one[key] for key in one if key != SEEN and not isinstance(one[key], dict)} for one in found]
    return any(one != found[0] for one in found)


def show(comparison: Comparison) -> None:
    """The table in the terminal, and its notes."""
    print_table(comparison.head, comparison.texts, comparison.left, comparison.beside)
    more = [f"--all shows {comparison.left_out} more metrics of these protocols."] if comparison.left_out else []
    for note in [*comparison.notes, *more]:
        console.print(f"- {note}")
