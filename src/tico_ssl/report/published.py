"""The paper's results beside ours, and the differences in how they were obtained."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tico_ssl.results.comparison import Comparison, Group
from tico_ssl.results.record import Record

WORDS = {
    "linear": "a linear classifier on features of unaugmented images, fitted by L-BFGS",
    "linear-augmented": "the paper's protocol",
}


@dataclass(frozen=True)
class Beside:
    """A row of a table of the paper, and our result."""

    row: str
    paper: float
    run: str
    ours: str


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper with our results, the paper's protocol, and the differences."""

    name: str
    protocol: str
    column: str
    rows: list[Beside]
    differences: list[str]


@cache
def published() -> dict[str, Any]:
    """The paper's results."""
    text = (resources.files("tico_ssl.report") / "published.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def beside_the_paper(comparison: Comparison) -> list[PaperTable]:
    """Every table of the paper for which some run has a result."""
    return [found for table in published()["tables"] if (found := _table(table, comparison.groups)) is not None]


def _table(table: dict[str, Any], groups: list[Group]) -> PaperTable | None:
    measures = [(p, m) for p, m in table["ours"] if any(group.number(p, m) for group in groups)]
    if not measures:
        return None
    protocol, metric = measures[0]
    taken: dict[str, dict[str, Any]] = {}
    for row in table["rows"]:  # specific rows come first: a run belongs to the first row that fits
        for group in groups:
            if group.name not in taken and group.number(protocol, metric) and _fits(row, group):
                taken[group.name] = row
    if not taken:
        return None
    rows = [
        Beside(row["name"], row["value"], group.name, ours.text())
        for row in table["rows"]
        for group in groups
        if group.name in taken and taken[group.name] is row and (ours := group.number(protocol, metric)) is not None
    ]
    used = [group.first for group in groups if group.name in taken]
    differences = _differences(table["setting"], used)
    if protocol != table["ours"][0][0]:
        differences.append(f"protocol: {WORDS.get(protocol, protocol)}, instead of the paper's")
    differences.append(f"evaluated on {_listed(_evaluated_on(record, protocol) for record in used)}")
    return PaperTable(table["name"], table["protocol"], f"{table['column']} ({protocol} {metric})", rows, differences)


def _fits(row: dict[str, Any], group: Group) -> bool:
    alike = all(group.first.setting(key) == value for key, value in row["is"].items())
    return alike and ("called" not in row or re.search(row["called"], group.name) is not None)


def _differences(setting: dict[str, Any], records: list[Record]) -> list[str]:
    """Settings that differ from the paper's, one per line: ours, instead of theirs."""
    keys = {
        "data": "data.source",
        "backbone": "backbone.name",
        "epochs": "training.epochs",
        "batch_size": "training.batch_size",
        "image_size": "data.image_size",
    }
    found = []
    for word, key in keys.items():
        ours = [record.setting(key) for record in records]
        same = [_same(word, value, setting[word]) for value in ours]
        if not all(same):
            found.append(f"{word.replace('_', ' ')}: {_listed(ours)}, instead of {setting[word]}")
    limits = [record.setting("data.limit") for record in records]
    if any(limit is not None for limit in limits):
        found.append(f"images: at most {_listed(limit for limit in limits if limit is not None)}, instead of all")
    return found


def _same(word: str, ours: Any, theirs: Any) -> bool:
    return "imagenet" in str(ours).lower() if word == "data" else bool(ours == theirs)


def _evaluated_on(record: Record, protocol: str) -> str:
    data = record.current_results.get(protocol, {}).get("data", {})
    return f"{data.get('test', '?'):,} test images of {data.get('source', '?')}" if data.get("test") else "unknown data"


def _listed(values: Any) -> str:
    """Distinct values in one line."""
    found = list(dict.fromkeys(str(value) for value in values))
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
