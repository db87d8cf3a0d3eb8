"""A line chart with two logarithmic axes as SVG, in the style of the report's figures."""

import itertools
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tico_ssl.report.charts import PALETTE
from tico_ssl.report.static import STYLE


def line_chart(path: Path, title: str, x_name: str, y_name: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Write a chart with one line per name; every measured x has a tick."""
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):  # text as text, not as paths
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot(xlabel=x_name, ylabel=y_name, xscale="log", yscale="log")
        axes.set_title(title, loc="left")
        for (name, line), colour in zip(lines.items(), itertools.cycle(PALETTE)):
            axes.plot(*zip(*line), "o-", color=colour, markersize=4, label=name)
        marks = sorted({x for line in lines.values() for x, _ in line})
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.set_xticks([], minor=True)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), labelcolor="linecolor")
        figure.savefig(path, metadata={"Date": None})
