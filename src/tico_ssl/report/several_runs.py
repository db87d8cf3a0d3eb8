"""The report of several runs, or of a study."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tico_ssl.report.charts import Chart, Series
from tico_ssl.report.html import Html, tag
from tico_ssl.report.one_run import curve
from tico_ssl.report.page import Cell, Section, bulleted, command, figure, folded, paragraph, table

if TYPE_CHECKING:  # these read runs with what trains them
    from tico_ssl.report.comparison import Comparison
    from tico_ssl.report.published import PaperTable

MOST_CURVES = 24  # in one figure
CLOSE = 2.0  # points of accuracy that another seed may turn round


def header(title: str, comparison: "Comparison", description: str) -> list[Html]:
    """What is compared, and who is ahead."""
    runs = sum(len(group.records) for group in comparison.groups)
    return [
        tag("p", "tico report", class_="kicker"),
        tag("h1", title),
        paragraph(description, class_="lead") if description else Html(""),
        tag("ul", [tag("li", text, class_="plain") for text in _sentences(comparison, runs)], class_="verdict"),
    ]


def _sentences(comparison: "Comparison", runs: int) -> list[str]:
    found = [f"{runs} runs of {len(comparison.groups)} recipes."]
    measure = headline(comparison)
    if measure is not None:
        ranked = [(spread, group) for group in comparison.groups if (spread := group.number(*measure))]
        best, group = max(ranked, key=lambda pair: pair[0].mean)
        found.append(f"Highest {' '.join(measure)}: {group.name} with {best} %.")
        rest = sorted((spread.mean for spread, other in ranked if other is not group), reverse=True)
        if rest and best.deviation is None and best.mean - rest[0] < CLOSE:
            found.append(
                f"The next is {best.mean - rest[0]:.1f} points behind: one seed cannot tell such a difference."
            )
        elif rest and best.deviation is not None and best.mean - rest[0] < 2 * best.deviation:
            found.append(f"The next is {best.mean - rest[0]:.1f} points behind, which is within two deviations.")
    return found


def headline(comparison: "Comparison") -> tuple[str, str] | None:
    """The protocol and the metric that stand for accuracy, if there is one."""
    tops = [(protocol, metric) for protocol, metric in comparison.metrics.items() if metric.startswith("top1")]
    return tops[0] if tops else None


def sections(comparison: "Comparison", tables: "list[PaperTable]") -> list[Section]:
    """All sections. `tables` are those of the paper that the runs have something to say about."""
    return [
        Section(
            "table",
            "Table",
            [
                paragraph("A click on a heading sorts by it."),
                table(comparison.head, comparison.rows, sortable=True),
                bulleted(comparison.notes),
            ],
        ),
        *([paper_section(tables)] if tables else []),
        curves(comparison),
        accuracy_and_time(comparison),
        recipes(comparison),
        Section(
            "runs",
            "Runs",
            [paragraph("Each run has a report of its own: ", command("tico report RUN")), _runs(comparison)],
        ),
    ]


def paper_section(tables: "list[PaperTable]") -> Section:
    """The paper's tables beside ours."""
    content: list[Html] = []
    for found in tables:
        rows: list[list[Cell | Html | str]] = [
            [row.row, Cell(f"{row.paper:.1f}", row.paper), row.run, Cell(row.ours, float(row.ours.split()[0]))]
            for row in found.rows
        ]
        content += [
            tag("h3", found.name),
            table(["row", "paper", "run", f"ours: {found.column}"], rows),
            paragraph(tag("strong", "The paper: "), found.protocol),
            paragraph(tag("strong", "What differs here: ")),
            bulleted(found.differences),
        ]
    return Section("paper", "The paper's numbers", content)


def curves(comparison: "Comparison") -> Section:
    """Curves of all runs in one figure; the runs of one recipe share a colour."""
    charts = []
    methods = {record.recipe["method"]["name"] for group in comparison.groups for record in group.records}
    unlike = "Losses of different methods are different things: each is drawn from its lowest to its highest."
    alike = "It should fall and then level off."
    for key, of_metrics, title, caption in (
        ("loss", True, "Loss", unlike if len(methods) > 1 else alike),
        ("knn_top1_k20", False, "kNN between epochs", "The curve to trust, where it was measured."),
        ("mean_cosine", True, "Cosine of different images", "Near 1, a network has collapsed."),
    ):
        series = []
        scaled = key == "loss" and len(methods) > 1
        for number, group in enumerate(comparison.groups):
            for record in group.records:
                lines = record.logged if of_metrics else record.judged_on_the_way
                if any(key in line for line in lines):
                    name = record.name if len(group.records) > 1 else group.name
                    found = curve(lines, key, name)
                    y = _of_its_range(found.y) if scaled else found.y
                    series.append(Series(found.name, found.x, y, rank=number))
        if series:
            left_out = f" The first {MOST_CURVES} of {len(series)} runs." if len(series) > MOST_CURVES else ""
            shown = series[:MOST_CURVES]
            height = 340 + 10 * len(shown)
            label = "share of its range" if scaled else title
            charts.append(Chart(key.replace("_", "-"), title, caption + left_out, shown, "epoch", label, height=height))
    content = [figure(chart) for chart in charts] or [paragraph("Nothing has been logged yet.", class_="missing")]
    return Section("curves", "Curves", content, charts)


def _of_its_range(values: Sequence[float | None]) -> list[float | None]:
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return [None if value is None else round((value - low) / ((high - low) or 1.0), 4) for value in values]


def accuracy_and_time(comparison: "Comparison") -> Section:
    """What a second of training buys."""
    measure = headline(comparison)
    series = []
    if measure is not None:
        for number, group in enumerate(comparison.groups):
            accuracy, seconds = group.number(*measure), group.seconds
            if accuracy is not None and seconds is not None:
                deviation = [accuracy.deviation or 0.0]
                series.append(Series(group.name, [seconds.mean], [accuracy.mean], deviation=deviation, rank=number))
    if measure is None or not series:
        text = "No run has an accuracy yet: "
        content = [paragraph(text, command("tico evaluate RUN knn linear rankme"), class_="missing")]
        return Section("cost", "Accuracy and time", content)
    chart = Chart(
        "accuracy-seconds",
        "Accuracy against training time",
        "Up and to the left is better. Bars are one deviation over seeds. Seconds are those of training steps alone.",
        series,
        "seconds of training",
        f"{' '.join(measure)}, per cent",
        marks=True,
        height=360 + 10 * len(series),
    )
    return Section("cost", "Accuracy and time", [figure(chart)], [chart])


def recipes(comparison: "Comparison") -> Section:
    """In what recipes differ."""
    differing, groups = comparison.differing_settings(), comparison.groups
    if not differing:
        return Section("recipes", "Recipes", [paragraph("All runs have the same recipe, apart from the seed.")])
    rows: list[list[Cell | Html | str]] = [
        [tag("code", key), *(_setting(value, values[0], number) for number, value in enumerate(values))]
        for key, values in differing.items()
    ]
    text = "Settings in which the recipes differ; what differs from the first run is marked. A dash: no such setting."
    head = ["setting", *(group.name for group in groups)]
    return Section("recipes", "Recipes", [paragraph(text), table(head, rows)])


def _setting(value: Any, first: Any, number: int) -> Html | str:
    text = "–" if value is None else str(value)
    return text if number == 0 or value == first else tag("mark", text)


def _runs(comparison: "Comparison") -> Html:
    rows: list[list[Cell | Html | str]] = [
        [record.name, record.state, tag("code", str(record.run.folder))]
        for group in comparison.groups
        for record in group.records
    ]
    return folded(f"{len(rows)} folders", table(["run", "state", "folder"], rows))
