"""One file that opens from disk: sections of text, tables and figures, with everything inlined."""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from tico_ssl.report.atlas import Atlas
from tico_ssl.report.charts import SYMBOLS, Chart, as_plotly, mark
from tico_ssl.report.html import Child, Html, inline_json, joined, tag
from tico_ssl.results.table import Cell


@dataclass(frozen=True)
class Section:
    """A section of the page. `key` is its anchor."""

    key: str
    title: str
    content: list[Html]
    charts: list[Chart] = field(default_factory=list)


@dataclass(frozen=True)
class Thumbnails:
    """Images that a map shows on hover: a name and a note for each, and their atlas."""

    atlas: Atlas
    names: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Noted(Cell):
    """A cell with a note in small letters below its number, such as an interval."""

    note: str = ""


def page(title: str, header: list[Html], sections: Sequence[Section], thumbnails: Thumbnails | None = None) -> str:
    """The whole document."""
    figures = {chart.key: as_plotly(chart) for section in sections for chart in section.charts}
    scripts = {"plotly": _plotly()} if figures else {}
    scripts["page"] = _packaged("script.js")
    body = [
        tag("a", "Skip to the content", class_="skip", href="#content"),
        tag("nav", tag("ol", [_link(section) for section in sections]), aria_label="Contents"),
        tag("main", tag("header", header), [_section(section) for section in sections], id="content"),
        _packed("data", inline_json({"figures": figures, "images": _described(thumbnails)})),
        *_sheets(thumbnails),
        _packed_plotly() if figures else None,
        tag("script", Html(scripts["page"])),
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(list(scripts.values()))),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(_packaged("style.css"))),
    ]
    return f"<!DOCTYPE html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _described(thumbnails: Thumbnails | None) -> dict[str, Any] | None:
    """What the map needs to know of its images."""
    if thumbnails is None:
        return None
    atlas = thumbnails.atlas
    layout = {"side": atlas.side, "columns": atlas.columns, "perSheet": atlas.per_sheet}
    return {**layout, "names": thumbnails.names, "notes": thumbnails.notes}


def _sheets(thumbnails: Thumbnails | None) -> list[Html]:
    """The sheets of the map's images, as they are: nothing makes them smaller."""
    if thumbnails is None:
        return []
    return [tag("script", inline_json(thumbnails.atlas.sheets), type="application/json", id="sheets")]


def _packed(key: str, text: str) -> Html:
    """Text that the page's script unpacks: Plotly takes a third of its size, and a map's points a quarter."""
    content = gzip.compress(text.encode(), 9, mtime=0)
    return tag("script", Html(base64.b64encode(content).decode()), type="application/gzip", id=key)


def _policy(scripts: Sequence[str]) -> str:
    """Content security policy: nothing is fetched, and only these scripts run, so that a name stays text. An unpacked
    script has to have its hash too.

    Plotly's WebGL compiles functions from text, hence unsafe-eval; it also sets styles on elements.
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


def figure(chart: Chart, *more: Child) -> Html:
    """A figure with its caption and a text alternative."""
    flag = [" ", tag("span", chart.flag, class_="flag")] if chart.flag else []
    style = f"height:{chart.height}px" + (f";max-width:{chart.height + 120}px" if chart.kind == "heat" else "")
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), " ", chart.caption, flag),
        tag("div", class_="plot", id=chart.key, role="img", aria_label=chart.alt, style=style),
        _legend(chart) if chart.kind == "points" else None,
        *more,
        class_="wide" if chart.kind in ("points", "heat") else None,
    )


def _legend(chart: Chart) -> Html:
    """The groups of a map as buttons: pointing at one highlights its points, a click keeps them so."""
    entries = []
    for number, series in enumerate(chart.series):
        colour, symbol = mark(chart, series, number)
        dot = tag("span", SYMBOLS[symbol], style=f"color:{colour}", aria_hidden="true")
        count = tag("small", f"{len(series.x):,}")
        button = tag("button", dot, " ", series.name, " ", count, type="button", aria_pressed="false")
        entries.append(tag("li", button))
    return tag("ul", entries, class_="legend", aria_label="Groups of the map")


def table(head: Sequence[str], rows: Sequence[Sequence[Cell | Html | str]], sortable: bool = False) -> Html:
    """A table that scrolls by itself when it is wider than the page; optionally its columns sort on a click."""
    align = ["number" if any(_is_number(row[i]) for row in rows) else None for i in range(len(head))]
    names = [
        tag("th", tag("button", name, type="button") if sortable else name, scope="col", class_=align[column])
        for column, name in enumerate(head)
    ]
    lines = [tag("tr", [_cell(value, align[i]) for i, value in enumerate(row)]) for row in rows]
    inner = tag("table", tag("thead", tag("tr", names)), tag("tbody", lines), class_="sortable" if sortable else None)
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label="Table")


def _is_number(value: Cell | Html | str) -> bool:
    return isinstance(value, Cell) and value.value is not None


def _cell(value: Cell | Html | str, align: str | None) -> Html:
    if isinstance(value, Cell):
        note = tag("small", value.note) if isinstance(value, Noted) and value.note else None
        return tag("td", value.text, note, class_=align, data_value=value.text if value.value is None else value.value)
    return tag("td", value, class_=align)


def paragraph(*children: Child, class_: str | None = None) -> Html:
    """Text."""
    return tag("p", *children, class_=class_)


def command(text: str) -> Html:
    """A command to type. Lines do not break after the hyphens of an option."""
    parts = re.split(r"(?<= )(--\S+)", text)
    return tag("code", [tag("span", part, class_="option") if part.startswith("--") else part for part in parts])


def folded(title: str, *children: Child, open_: bool = False) -> Html:
    """Collapsible content."""
    return tag("details", tag("summary", title), *children, open=open_)


def bulleted(lines: Sequence[str]) -> Html:
    """A list of sentences."""
    return tag("ul", [tag("li", line) for line in lines])


def _link(section: Section) -> Html:
    return tag("li", tag("a", section.title, href=f"#{section.key}"))


def _section(section: Section) -> Html:
    return tag("section", tag("h2", section.title), joined(*section.content), id=section.key)


def _packaged(name: str) -> str:
    return (resources.files("tico_ssl.report") / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


@cache
def _packed_plotly() -> Html:
    return _packed("plotly", _plotly())
