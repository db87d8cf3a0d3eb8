"""Published results beside those of runs: the row that a run's settings match, and what differs in words.

Data, backbone, method and evaluation decide whether a row fits; epochs and batch size choose among those that do, and
both are shown, the published ones and the run's. A run that no row fits is shown beside none.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tico_ssl.report.html import Html, tag
from tico_ssl.report.page import Section, bulleted, folded, paragraph, table
from tico_ssl.results.comparison import Group
from tico_ssl.results.record import Line, Record
from tico_ssl.results.table import Cell
from tico_ssl.runtime.wording import counted

Table = dict[str, Any]
Row = dict[str, Any]

EVALUATIONS = {
    "linear": "a linear classifier on features of unaugmented images, fitted by L-BFGS",
    "linear-augmented": "a linear classifier trained on random crops after pretraining",
    "knn": "kNN by the backbone's features, after the last epoch",
}

WORDS = {"optimizer.name": "optimiser", "optimizer.weight_decay": "weight decay"}


@dataclass(frozen=True)
class Beside:
    """A row of a published table and the result of a run, each with its epochs and batch size; other differences."""

    row: str
    value: float
    epochs: int | None
    batch: int | None
    run: str
    ours: str
    our_epochs: float
    our_batch: int
    differences: list[str]


@dataclass(frozen=True)
class PublishedTable:
    """A published table with results of runs."""

    name: str
    source: str
    protocol: str
    rows: list[Beside]


@cache
def published() -> dict[str, Any]:
    """The published results."""
    text = (resources.files("tico_ssl.report") / "published.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def beside_published(groups: Sequence[Group]) -> list[PublishedTable]:
    """Every table with a row for some of these runs. A run has at most one row per measure: the nearest."""
    pairs = [(group, *found) for group in groups for found in _nearest_rows(group)]
    matched = {(group.name, entry["measure"]) for group, entry, _ in pairs}
    for entry in published()["tables"]:
        if entry.get("ablation"):
            pairs += _elsewhere(entry, [group for group in groups if (group.name, entry["measure"]) not in matched])
    return [
        PublishedTable(
            entry["name"],
            entry["source"],
            entry["protocol"],
            [_beside(group, entry, row) for row in entry["rows"] for group, _, mine in pairs if mine is row],
        )
        for entry in published()["tables"]
        if any(found is entry for _, found, _ in pairs)
    ]


def _nearest_rows(group: Group) -> Iterator[tuple[Table, Row]]:
    """Of the rows of each measure that a run fits, the nearest in epochs, then in batch size."""
    for measure in published()["measures"]:
        fitting = [
            (entry, row)
            for entry in published()["tables"]
            if entry["measure"] == measure and _table_fits(entry, group)
            for row in entry["rows"]
            if _row_fits(row, group.first)
        ]
        if fitting:
            yield min(fitting, key=lambda found: _distance(found[1], group.first))


def _elsewhere(entry: Table, groups: Sequence[Group]) -> list[tuple[Group, Table, Row]]:
    """Runs that repeat an ablation on other data: its point is the order of its rows, so at least two are needed."""
    pairs = [
        (group, entry, row)
        for group in groups
        if _measured(entry, group)
        for row in entry["rows"]
        if _row_fits(row, group.first)
    ]
    return pairs if len({row["name"] for _, _, row in pairs}) > 1 else []


def _measured(entry: Table, group: Group) -> tuple[str, str] | None:
    """The evaluation and metric of a run that measure what a table does."""
    measures: list[list[str]] = published()["measures"][entry["measure"]]
    return next(((protocol, metric) for protocol, metric in measures if group.number(protocol, metric)), None)


def _table_fits(entry: Table, group: Group) -> bool:
    record, measured = group.first, _measured(entry, group)
    if measured is None:
        return False
    result = _result(group, measured[0])
    return (
        _is_data(record.setting("data.source"), entry["data"])
        and _is_data(result.get("data", {}).get("source"), _tested(entry))
        and str(record.setting("backbone.name")).split("/")[-1] == entry["backbone"]
        and all(_has(result.get("settings", {}).get(key), value) for key, value in entry.get("evaluation", {}).items())
    )


def _tested(entry: Table) -> str:
    """Data of the evaluation."""
    return str(entry.get("tested") or entry["data"])


def _is_data(source: Any, name: str) -> bool:
    """Whether a source (a name, or paths) is a data set by its name; a part or a relative of it is another."""
    return bool(source) and re.search(published()["data"][name]["called"], str(source).lower()) is not None


def _has(setting: Any, value: Any) -> bool:
    return value in setting if isinstance(setting, list) else bool(setting == value)


def _row_fits(row: Row, record: Record) -> bool:
    facts = _views(record)
    return all((facts[key] if key in facts else record.setting(key)) == value for key, value in row["is"].items())


def _views(record: Record) -> dict[str, Any]:
    """What decides a row about views: their number per image, and which operations any of them has."""
    policies = [policy for policy in record.recipe.get("views") or [] if isinstance(policy, dict)]
    operations = ("jitter", "greyscale", "blur", "solarise")
    return {"crops": sum(policy.get("count", 1) for policy in policies)} | {
        name: any(policy.get(name, 0) > 0 for policy in policies) for name in operations
    }


def _distance(row: Row, record: Record) -> tuple[float, float]:
    """Factors between epochs and between batch sizes; a row without them comes last."""
    theirs, ours = (row["epochs"], row["batch"]), (_epochs(record), _batch(record))
    epochs, batch = (abs(math.log(b / a)) if a and b else math.inf for a, b in zip(theirs, ours))
    return epochs, batch


def _epochs(record: Record) -> float:
    """Epochs that were trained, which may be fewer than those of the recipe."""
    return record.epoch or float(record.epochs)


def _batch(record: Record) -> int:
    return record.batch_size


def _result(group: Group, protocol: str) -> Line:
    """The result of the first seed that has been evaluated."""
    return next((found for record in group.records if (found := record.current_results.get(protocol))), {})


def _beside(group: Group, entry: Table, row: Row) -> Beside:
    record, measured = group.first, _measured(entry, group)
    assert measured is not None
    spread = group.number(*measured)
    assert spread is not None
    return Beside(
        row["name"],
        row["value"],
        row["epochs"],
        row["batch"],
        group.name,
        spread.text(),
        _epochs(record),
        _batch(record),
        [*_other_training(row, record), *_differences(entry, group, measured[0])],
    )


def _other_training(row: Row, record: Record) -> Iterator[str]:
    """Differences in optimiser and weight decay, where the published ones are known."""
    for key, theirs in row.get("with", {}).items():
        if (ours := record.setting(key)) != theirs:
            yield f"{WORDS[key]}: {ours} instead of {theirs}"


def _differences(entry: Table, group: Group, protocol: str) -> list[str]:
    """Differences in data, backbone and evaluation, in words."""
    found, record = [], group.first
    source, network = str(record.setting("data.source")), str(record.setting("backbone.name")).split("/")[-1]
    if not _is_data(source, entry["data"]):
        found.append(f"data: {source} instead of {entry['data']}")
    if network != entry["backbone"]:
        found.append(f"backbone: {network} instead of {entry['backbone']}")
    if (side := record.setting("data.image_size")) != entry["image_size"]:
        found.append(f"images of {side} pixels instead of {entry['image_size']}")
    if record.images is not None and (record.setting("data.limit") is not None or record.setting("data.held_out")):
        found.append(f"pretrained on {counted(record.images, 'image')}")
    if protocol != entry.get("here"):
        found.append(f"ours: {EVALUATIONS.get(protocol, protocol)}")
    data, usual = _result(group, protocol).get("data", {}), published()["data"][_tested(entry)]
    for split, word in (("train", "training"), ("test", "test")):
        if split in usual and split in data and data[split] != usual[split]:
            found.append(f"evaluated with {counted(data[split], f'{word} image')} instead of {usual[split]:,}")
    return found


def published_sections(tables: Sequence[PublishedTable]) -> list[Section]:
    """The published results beside those of the runs, folded: they are for those who ask; none without any."""
    if not tables:
        return []
    head = ["published", "result", "epochs", "batch", "run", "result", "epochs", "batch", "further differences"]
    content: list[Html] = []
    for found in tables:
        rows: list[list[Cell | Html | str]] = [
            [
                one.row,
                Cell(f"{one.value:g}", one.value),
                _given(one.epochs),
                _given(one.batch),
                one.run,
                Cell(one.ours, float(one.ours.split()[0])),
                Cell(f"{one.our_epochs:.4g}", one.our_epochs),
                Cell(str(one.our_batch), float(one.our_batch)),
                bulleted(one.differences) if one.differences else "none",
            ]
            for one in found.rows
        ]
        content += [
            tag("h3", found.name),
            paragraph(found.protocol, " Source: ", found.source, "."),
            table(head, rows),
        ]
    text = "Not compared: learning rates, schedules, heads and most augmentations. See the recipe's description."
    inner = folded("Published results beside these", *content, paragraph(text))
    return [Section("published", "Published results", [inner])]


def _given(number: int | None) -> Cell:
    return Cell("not given") if number is None else Cell(str(number), float(number))
