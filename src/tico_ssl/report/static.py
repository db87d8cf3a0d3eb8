"""The same figures for papers: SVG and PNG."""

from pathlib import Path
from typing import Any

from tico_ssl.report.charts import SHOWN_CELLS, Chart, Series, shown_names, style
from tico_ssl.runtime.files import written_atomically

DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "D", "^", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "tico",  # deterministic files
}


def save(charts: list[Chart], folder: Path) -> list[Path]:
    """Each chart as KEY.svg and KEY.png in a folder; returns the files."""
    import logging

    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a glyph missing from the font is drawn as a box
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(STYLE):
        for chart in charts:
            square = chart.kind in ("heat", "points")
            rows = max((len(series.x) for series in chart.series), default=0) if chart.kind == "bars" else 0
            figure = Figure(figsize=(5, 5) if square else (5, max(3.1, 0.22 * rows)), layout="constrained")
            _draw(figure.add_subplot(), chart)
            for suffix in ("svg", "png"):
                file = folder / f"{chart.key}.{suffix}"
                with written_atomically(file) as temporary:
                    stamp = {"Date": None} if suffix == "svg" else None
                    figure.savefig(temporary, format=suffix, dpi=200, metadata=stamp)
                figure.set_layout_engine("none")  # found once, it holds for the other format too
                files.append(file)
    return files


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), loc="left", fontsize=10)
    axes.set_xlabel(_plain(chart.x_label))
    axes.set_ylabel(_plain(chart.y_label))
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    if chart.kind == "heat":
        _heat(axes, chart)
        return
    draw = {"lines": _line, "bars": _bars, "points": _points}[chart.kind]
    for number, series in enumerate(chart.series):
        draw(axes, chart, series, *style(chart, series, number))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.kind == "points":
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.legend(fontsize=7, markerscale=3, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    elif len(chart.series) > 1 and chart.kind != "bars":
        axes.legend(fontsize=7, ncols=2 if len(chart.series) > 6 else 1)


def _line(axes: Any, chart: Chart, series: Series, colour: str, turn: int) -> None:
    x, y = _numbers(series.x), _numbers(series.y)
    dash = "--" if series.dashed else DASHES[turn % len(DASHES)]
    mark = "o" if chart.marks or len(x) < 2 else None
    if series.deviation is None:
        axes.plot(x, y, dash, color=colour, marker=mark, markersize=4, linewidth=1.4, label=_plain(series.name))
    else:
        axes.errorbar(x, y, _numbers(series.deviation), color=colour, fmt="o", capsize=2, label=_plain(series.name))


def _bars(axes: Any, chart: Chart, series: Series, colour: str, turn: int) -> None:
    places = range(len(series.x))
    axes.barh(places, _numbers(series.y), color=colour)
    axes.set_yticks(places, [_plain(str(name)) for name in series.x])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _points(axes: Any, chart: Chart, series: Series, colour: str, turn: int) -> None:
    axes.scatter(
        series.x,
        series.y,
        s=4,
        color=colour,
        marker=MARKS[turn % len(MARKS)],
        linewidths=0,
        alpha=0.7,
        label=_plain(series.name),
        rasterized=True,  # ten thousand vector markers would slow down a viewer
    )


def _heat(axes: Any, chart: Chart) -> None:
    places, texts = shown_names(chart.names)
    names = [_plain(name) for name in texts]
    axes.imshow(chart.cells, cmap="Blues", vmin=0)
    axes.grid(visible=False)
    axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_yticks(places, names, fontsize=7)
    if len(chart.names) ** 2 <= SHOWN_CELLS:
        most = max((value for row in chart.cells for value in row), default=1.0)
        for row, values in enumerate(chart.cells):
            for column, value in enumerate(values):
                ink = "white" if value > 0.6 * most else "#333333"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=ink)


def _numbers(values: Any) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _plain(text: str) -> str:
    """Text with $ escaped, which would start a formula."""
    return text.replace("$", r"\$")
