"""A line chart with two logarithmic axes as SVG, without any library."""

import math
from collections.abc import Callable
from html import escape
from pathlib import Path

Place = Callable[[float, float], tuple[float, float]]  # of a point, in the picture
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind people
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 80, 200, 40, 60


def line_chart(path: Path, title: str, x_name: str, y_name: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Write one line for each name, with its points."""
    points = [point for line in lines.values() for point in line]
    x_range, y_range = (_powers([point[axis] for point in points]) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = _share(x, x_range), _share(y, y_range)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
    ]
    parts += _grid(x_range, y_range, place, sorted({point[0] for point in points}))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(*point) for point in line]
        trace = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{trace}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        below = TOP + 14 + 20 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 14}" y="{below}" fill="{colour}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _powers(values: list[float]) -> tuple[float, float]:
    low, high = math.floor(math.log10(min(values)) * 2) / 2, math.ceil(math.log10(max(values)) * 2) / 2
    return low, max(high, low + 0.5)


def _share(value: float, limits: tuple[float, float]) -> float:
    return (math.log10(value) - limits[0]) / (limits[1] - limits[0])


def _grid(x_range: tuple[float, float], y_range: tuple[float, float], place: Place, marks: list[float]) -> list[str]:
    parts = []
    for exponent in range(math.ceil(y_range[0]), math.floor(y_range[1]) + 1):
        x, y = place(10 ** x_range[0], 10**exponent)
        end, _ = place(10 ** x_range[1], 10**exponent)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    for mark in marks:
        x, y = place(mark, 10 ** y_range[0])
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{mark:g}</text>')
    return parts
