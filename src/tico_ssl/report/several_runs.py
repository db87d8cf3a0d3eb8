"""The report of several runs, or of a study."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tico_ssl.report.charts import Chart, Series
from tico_ssl.report.findings import progress
from tico_ssl.report.html import Html, joined, tag
from tico_ssl.report.names import data_name, full_name, within
from tico_ssl.report.page import Section, bulleted, command, figure, folded, paragraph, table
from tico_ssl.report.published import PublishedTable, published_sections
from tico_ssl.report.run_curves import curve, moved
from tico_ssl.results.comparison import Comparison, comparison_of
from tico_ssl.results.metrics import USUAL
from tico_ssl.results.reading import some
from tico_ssl.results.record import KNN, Record
from tico_ssl.results.table import Cell
from tico_ssl.runtime.wording import counted

MOST_CURVES = 24  # in one figure
FACTS = ("method", "seeds", "epochs", "seconds", "images/s")  # columns of the table that are no results


def by_data(whole: Comparison) -> dict[str, Comparison]:
    """The comparison taken apart by data set: results on different data are not comparable."""
    found: dict[str, list[Record]] = {}
    for group in whole.groups:
        for record in group.records:
            found.setdefault(data_name(record), []).append(record)
    return {data: whole if len(found) == 1 else comparison_of(records) for data, records in found.items()}


def header(title: str, comparisons: Mapping[str, Comparison], description: str) -> list[Html]:
    """What is compared, and the best of each data set."""
    sentences = []
    for data, comparison in comparisons.items():
        where = f"{data}: " if len(comparisons) > 1 else ""
        sentences += [f"{where}{text}" for text in _sentences(comparison)]
    return [
        tag("p", "tico report", class_="kicker"),
        tag("h1", title),
        paragraph(description, class_="lead") if description else Html(""),
        tag("ul", [tag("li", text, class_="plain") for text in sentences], class_="verdict"),
    ]


def _sentences(comparison: Comparison) -> list[str]:
    runs = sum(len(group.records) for group in comparison.groups)
    recipes = f"{len(comparison.groups)} recipes" if len(comparison.groups) > 1 else "one recipe"
    found = [f"{counted(runs, 'run')} of {recipes}." if runs > 1 else "One run."]
    if (by := comparison.headline) is None:
        return found
    sign = 1 if by.metric.better == "higher" else -1
    ranked = [(spread, group) for group in comparison.groups if (spread := group.number(by.protocol, by.name))]
    if not ranked:
        return found
    best, group = max(ranked, key=lambda pair: sign * pair[0].mean)
    word, value = "Highest" if sign > 0 else "Lowest", f"{best.text(by.metric.digits)} {by.metric.unit}".rstrip()
    with_others = f"{word} {within(full_name(by))}: {group.name} with {value}."
    found.append(with_others if len(ranked) > 1 else f"{full_name(by)}: {value}.")
    return found


def sections(
    whole: Comparison, comparisons: Mapping[str, Comparison], tables: Sequence[PublishedTable]
) -> list[Section]:
    """All sections, those that compare once for each data set. `tables` are published ones with results of these
    runs."""
    found = []
    for number, (data, comparison) in enumerate(comparisons.items()):
        mine = f"-{number + 1}" if number else ""  # ids of figures and sections differ
        where = f": {data}" if len(comparisons) > 1 else ""
        parts = [_table(comparison), curves(comparison, mine), accuracy_and_time(comparison, mine), recipes(comparison)]
        found += [replace(part, key=part.key + mine, title=part.title + where) for part in parts]
    failed = [note for note in whole.notes if " failed: " in note and len(comparisons) > 1]
    content = [paragraph("For a report of a single run: ", command("tico report RUN"))]
    content += [bulleted(failed)] if failed else []
    return [*found, *published_sections(tables), Section("runs", "Runs", [*content, _runs(whole)])]


def _table(comparison: Comparison) -> Section:
    """Results before facts, so that a phone shows them."""
    names = {str(one): full_name(one) for one in comparison.shown}
    columns = sorted(range(1, len(comparison.head)), key=lambda column: comparison.head[column] in FACTS)
    head = [names.get(text, text) for text in (comparison.head[column] for column in (0, *columns))]
    rows = [[row[column] for column in (0, *columns)] for row in comparison.rows]
    content = [paragraph("Click a heading to sort."), table(head, rows, sortable=True)]
    return Section("table", "Table", [*content, bulleted(comparison.notes)])


def curves(comparison: Comparison, mine: str = "") -> Section:
    """Curves of all runs in one figure; runs of one recipe share a colour. `mine` ends the names of its figures."""
    charts = [
        _curves(comparison, KNN, "kNN accuracy during training", "The most reliable sign of progress."),
        _curves(comparison, "mean_cosine", "Cosine similarity of different images", "Near 1, a network has collapsed."),
    ]
    found = [replace(chart, key=chart.key + mine) for chart in (_losses(comparison), *charts) if chart.series]
    content = [figure(chart) for chart in found] or [paragraph("Nothing has been logged yet.", class_="missing")]
    return Section("curves", "Curves", content, found)


def _losses(comparison: Comparison) -> Chart:
    """Losses, each in its own range where methods differ; one that rises is flagged where it should fall."""
    records = [record for group in comparison.groups for record in group.records]
    if len({str(record.setting("method.name")) for record in records}) > 1:
        text = "Losses of different methods are not comparable: each is scaled to its own range."
        chart = _curves(comparison, "loss", "Loss", text)
        scaled = [replace(series, y=_of_its_range(series.y)) for series in chart.series]
        return replace(chart, series=scaled, y_label="loss, scaled to its range")
    rising = [record.name for record in records if moved([line["loss"] for line in record.logged], "rose")]
    chart = _curves(comparison, "loss", "Loss", "Should fall and then level off.")
    return replace(chart, flag=f"Here it rose in {some(rising)}." if rising else "")


def _curves(comparison: Comparison, key: str, title: str, caption: str) -> Chart:
    """A metric of all runs that have logged it."""
    series = []
    for number, group in enumerate(comparison.groups):
        for record in group.records:
            lines = record.between_epochs if key == KNN else record.logged
            if any(key in line for line in lines):
                name = record.name if len(group.records) > 1 else group.name
                series.append(replace(curve(lines, key, name), rank=number))
    shown = series[:MOST_CURVES]
    left_out = f" The first {MOST_CURVES} of {counted(len(series), 'run')}." if len(series) > MOST_CURVES else ""
    height = 340 + 10 * len(shown)
    return Chart(key.replace("_", "-"), title, caption + left_out, shown, "epoch", title, height=height)


def _of_its_range(values: Sequence[float | None]) -> list[float | None]:
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return [None if value is None else round((value - low) / ((high - low) or 1.0), 4) for value in values]


def accuracy_and_time(comparison: Comparison, mine: str = "") -> Section:
    """Accuracy against training time."""
    by = comparison.headline
    series = []
    for number, group in enumerate(comparison.groups):
        accuracy, seconds = group.number(by.protocol, by.name) if by else None, group.seconds
        if accuracy is not None and seconds is not None:
            deviation = [accuracy.deviation or 0.0]
            series.append(Series(group.name, [seconds.mean], [accuracy.mean], deviation=deviation, rank=number))
    if by is None or not series:
        text = "No run has an accuracy yet: "
        content = [paragraph(text, command(f"tico evaluate RUN {' '.join(USUAL)}"), class_="missing")]
        return Section("cost", "Accuracy and time", content)
    better = "Up" if by.metric.better == "higher" else "Down"
    chart = Chart(
        f"accuracy-seconds{mine}",
        "Accuracy against training time",
        f"{better} and to the left is better. Bars are one standard deviation over seeds. "
        "Seconds are those of training steps only.",
        series,
        "seconds of training",
        f"{full_name(by)}, {by.metric.unit}".rstrip(", "),
        marks=True,
        height=360 + 10 * len(series),
    )
    return Section("cost", "Accuracy and time", [figure(chart)], [chart])


def recipes(comparison: Comparison) -> Section:
    """Differences between the recipes."""
    differing, groups = comparison.differing_settings(), comparison.groups
    if not differing:
        return Section("recipes", "Recipes", [paragraph("All runs have the same recipe, apart from the seed.")])
    rows: list[list[Cell | Html | str]] = [
        [tag("code", key), *(_setting(value, values[0], number) for number, value in enumerate(values))]
        for key, values in differing.items()
    ]
    text = "Settings in which the recipes differ; values that differ from the first run are marked. –: no such setting."
    head = ["setting", *(group.name for group in groups)]
    return Section("recipes", "Recipes", [paragraph(text), table(head, rows)])


def _setting(value: Any, first: Any, number: int) -> Html | str:
    text = "–" if value is None else str(value)
    return text if number == 0 or value == first else tag("mark", text)


def _runs(comparison: Comparison) -> Html:
    rows: list[list[Cell | Html | str]] = [
        [record.name, _state(record), tag("code", str(record.run.folder))]
        for group in comparison.groups
        for record in group.records
    ]
    return folded(counted(len(rows), "folder"), table(["run", "state", "folder"], rows))


def _state(record: Record) -> Html:
    """How far a run has come; of a stopped one with the command that resumes it."""
    said = progress(record)
    return joined(said.text, " ", command(said.command)) if said.command else joined(said.text)
