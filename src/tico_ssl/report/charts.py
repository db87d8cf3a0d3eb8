"""Charts as data: the browser and papers get the same figure.

`as_plotly` turns a chart into a Plotly figure, `static.save` into files for papers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tico_ssl.runtime.wording import counted

# Okabe and Ito's colour-blind safe palette, with a lighter blue, and grey for black, so that all are visible on white
# and on near-black. Beyond eight series, marker shapes change.
PALETTE = ("#1f83c4", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#9a8f00", "#8a8f98")
# Points lie among each other, so neighbours of a map need more colours than lines: twelve hues, of which neighbours on
# the colour wheel differ in lightness.
HUES = (
    *("#3760c9", "#fa8927", "#118d29", "#f471aa", "#8c6a00", "#07b8fe"),
    *("#cb4644", "#0dc6a6", "#9b79ee", "#b4c21a", "#a449aa", "#0a7f8a"),
)
OTHER = "#a3a9b1"  # what has no colour of its own
SYMBOLS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "cross": "✚", "x": "✖", "star": "★"}
OPACITY = 0.75  # of a point
DASHES = ("solid", "dash", "dot", "dashdot")
SHOWN_NAMES, LONGEST_NAME = 25, 22  # labels on the axis of a heat map, and characters of each
BEGUN, ENDED = (154, 165, 177), (213, 94, 0)  # colours of the first and the last epoch
SHOWN_CELLS = 400  # with numbers in a heat map; more are illegible

Kind = Literal["lines", "bars", "heat", "points"]


@dataclass(frozen=True)
class Series:
    """One series. `dashed` is for reference lines that were not measured."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    colour: str | None = None
    dashed: bool = False
    deviation: Sequence[float | None] | None = None
    places: Sequence[int] | None = None
    """In a map: the image of each point."""
    rank: int | None = None
    """Index of its colour, dash and shape, if not its position in the chart."""


@dataclass(frozen=True)
class Chart:
    """A figure: `key` is its id and its file name; the caption says what to look for."""

    key: str
    title: str
    caption: str
    series: Sequence[Series]
    x_label: str = ""
    y_label: str = ""
    kind: Kind = "lines"
    log_x: bool = False
    log_y: bool = False
    cells: Sequence[Sequence[float]] = field(default_factory=list)
    names: Sequence[str] = ()
    """Names of the rows and columns of a heat map."""
    marks: bool = False
    """Markers on the points of a line."""
    from_zero: bool = False
    """The y axis starts at zero."""
    height: int = 340
    flag: str = ""
    """What is not as the caption says that it should be."""

    @property
    def alt(self) -> str:
        """Text alternative in one sentence."""
        if self.kind == "heat":
            return f"Heat map of {len(self.names)} by {len(self.names)} classes: {self.title}."
        if self.kind == "points":
            points = counted(sum(len(s.x) for s in self.series), "point")
            return f"{self.title}: {points} in {counted(len(self.series), 'group')}."
        ends = []
        for series in self.series[:6]:
            values = [value for value in series.y if value is not None]
            if values and self.kind == "bars":
                ends += [f"{name} {value:.4g}" for name, value in list(zip(series.x, values))[:12]]
            elif values:
                ends.append(f"{series.name} from {values[0]:.4g} to {values[-1]:.4g}")
        word = "Bars" if self.kind == "bars" else "Curves"
        return f"{word}: {self.title}. {'; '.join(ends)}."


def label(text: str) -> str:
    """Text with markup escaped: Plotly would interpret tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def over_time(share: float) -> str:
    """Colour of a moment of a run, from 0 to 1."""
    mixed = (round(a + (b - a) * share) for a, b in zip(BEGUN, ENDED))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def as_plotly(chart: Chart) -> dict[str, Any]:
    """Data and layout of a Plotly figure. Background, text and grid colours are the page's, which may change."""
    traces = {"lines": _line, "bars": _bars, "points": _points}
    data = (
        [_heat(chart)]
        if chart.kind == "heat"
        else [traces[chart.kind](chart, s, i) for i, s in enumerate(chart.series)]
    )
    layout: dict[str, Any] = {
        "height": chart.height,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "xaxis": {"title": {"text": label(chart.x_label)}, "automargin": True},
        "yaxis": {"title": {"text": label(chart.y_label)}, "automargin": True},
        "showlegend": len(chart.series) > 1 and chart.kind == "lines",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified" if chart.kind == "lines" and not chart.log_x and not chart.marks else "closest",
    }
    if chart.from_zero:
        layout["yaxis"] |= {"rangemode": "tozero"}
    if chart.log_x:
        layout["xaxis"] |= {"type": "log", "dtick": 1}
    if chart.log_y:
        layout["yaxis"] |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    if chart.kind == "points":  # fill the width: axes of a map have no unit
        layout |= {"margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "dragmode": "pan"}
        layout["xaxis"], layout["yaxis"] = {"visible": False}, {"visible": False}
    if chart.kind == "heat":
        layout["yaxis"] |= {"autorange": "reversed", "scaleanchor": "x", **_class_axis(chart.names)}
        layout["yaxis"] |= {"constrain": "domain", "constraintoward": "top"}
        layout["xaxis"] |= {"constrain": "domain", "constraintoward": "left", **_class_axis(chart.names)}
        layout["xaxis"] |= {"tickangle": -90}  # side by side they collide
        for axis in (layout["xaxis"], layout["yaxis"]):
            axis["title"]["standoff"] = 10  # else a title lies on the longest names
    if chart.kind == "bars":
        layout |= {"bargap": 0.35, "barcornerradius": 3, "margin": {"l": 56, "r": 36, "t": 12, "b": 44}}
        layout["yaxis"] |= {"type": "category", "autorange": "reversed", "ticksuffix": "  "}
        layout["xaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def style(chart: Chart, series: Series, number: int) -> tuple[str, int]:
    """The colour of a series, and how often the palette has been used up: then dashes and shapes differ."""
    palette = HUES if chart.kind == "points" else PALETTE
    number = number if series.rank is None else series.rank
    return (series.colour, 0) if series.colour else (palette[number % len(palette)], number // len(palette))


def mark(chart: Chart, series: Series, number: int) -> tuple[str, str]:
    """The colour and the shape of the points of a series."""
    colour, turn = style(chart, series, number)
    return colour, list(SYMBOLS)[turn % len(SYMBOLS)]


def shown_names(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The classes whose names fit on the axis of a heat map, evenly spaced, and these names, the long ones cut."""
    places = list(range(0, len(names), -(-len(names) // SHOWN_NAMES) or 1))
    cut = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…" for name in names]
    return places, [cut[place] for place in places]


def _class_axis(names: Sequence[str]) -> dict[str, Any]:
    places, texts = shown_names(names)
    at = [label(names[place]) for place in places]  # not the places, which a class may be called like
    return {"type": "category", "tickmode": "array", "tickvals": at, "ticktext": [label(text) for text in texts]}


def _line(chart: Chart, series: Series, number: int) -> dict[str, Any]:
    colour, turn = style(chart, series, number)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if len(series.x) < 2 else "lines+markers" if chart.marks else "lines",
        "name": label(series.name),
        "x": list(series.x),
        "y": list(series.y),
        "line": {"color": colour, "width": 2, "dash": "dash" if series.dashed else DASHES[turn % len(DASHES)]},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": f"{label(series.name)}: %{{y:.4~g}}<extra></extra>",
    }
    if series.deviation is not None:
        trace["error_y"] = {"array": [value or 0.0 for value in series.deviation], "color": colour, "thickness": 1}
    if chart.marks:
        trace["hovertemplate"] = f"{label(series.name)}<br>%{{x:.4~g}}, %{{y:.4~g}}<extra></extra>"
    return trace


def _bars(chart: Chart, series: Series, number: int) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(series.name),
        "y": [label(str(name)) for name in series.x],
        "x": list(series.y),
        "marker": {"color": style(chart, series, number)[0]},
        "hovertemplate": "%{y}: %{x:.4~g}<extra></extra>",
        "texttemplate": "%{x:.3~g}",
        "textposition": "outside",
        "constraintext": "none",
        "cliponaxis": False,
    }


def _points(chart: Chart, series: Series, number: int) -> dict[str, Any]:
    colour, symbol = mark(chart, series, number)
    return {
        "type": "scattergl",
        "mode": "markers",
        "name": label(series.name),
        "x": list(series.x),
        "y": list(series.y),
        "customdata": list(series.places or ()),
        "marker": {"color": colour, "size": _point_size(chart), "opacity": OPACITY, "symbol": symbol},
        "hoverinfo": "none",
    }


def _point_size(chart: Chart) -> int:
    """Few points are drawn larger, so that their colour is seen."""
    count = sum(len(series.x) for series in chart.series)
    return 8 if count <= 2_000 else 6 if count <= 5_000 else 5


def _heat(chart: Chart) -> dict[str, Any]:
    names = [label(name) for name in chart.names]
    few = len(names) ** 2 <= SHOWN_CELLS
    return {
        "type": "heatmap",
        "z": [list(row) for row in chart.cells],
        "x": names,
        "y": names,
        "xgap": 1,
        "ygap": 1,
        "zmin": 0,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "len": 0.8},
        "hovertemplate": "%{y} predicted as %{x}: %{z:.1f} %<extra></extra>",
        **({"texttemplate": "%{z:.0f}", "showscale": False} if few else {}),
    }
