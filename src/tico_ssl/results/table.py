"""Tables in the terminal: of an evaluation, or of any head and rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

from tico_ssl.results.metrics import Measurement, measurements
from tico_ssl.results.record import Result, duration
from tico_ssl.results.verdict import verdict
from tico_ssl.runtime.progress import console


@dataclass(frozen=True)
class Cell:
    """Text of a cell, and its number if it has one."""

    text: str
    value: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class Sheet:
    """A table with notes."""

    head: list[str]
    rows: list[list[Cell]]
    notes: list[str]

    @property
    def left(self) -> list[int]:
        """Columns of text, aligned left."""
        return [i for i in range(len(self.head)) if all(row[i].value is None for row in self.rows)]

    @property
    def texts(self) -> list[list[str]]:
        """Texts of the cells."""
        return [[cell.text for cell in row] for row in self.rows]


def print_results(results: Sequence[Result]) -> None:
    """A row per metric, a column per representation, the difference due to training, and the verdict."""
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    compared = {"trained", "untrained"} <= set(names)
    table = Table(title=_title(results[0]), title_justify="left", title_style="")
    table.add_column("protocol")
    for name in [*names, "difference"] if compared else names:
        table.add_column(name, justify="right")
    for result in results:
        for found in measurements(result.protocol, result.numbers):
            cells = [found.text(name) for name in names]
            table.add_row(f"{result.protocol} {found.title}", *cells, *([_difference(found)] if compared else []))
    console.print()
    console.print(table)
    if (said := verdict((result.protocol, result.numbers) for result in results)) is not None:
        console.print(str(said), markup=False)


def _difference(found: Measurement) -> str:
    return "" if found.gain is None else f"{found.gain:+.{found.metric.digits}f}"


def _title(result: Result) -> str:
    data = result.data
    images = f"{data['train']:,} training and {data['test']:,} test images ({data['split']})"
    return f"{data['source']}: {'a quick look at ' if data.get('quick') else ''}{images}"


def in_a_line(result: Result) -> str:
    """The first metric of a result."""
    took = f" ({duration(result.seconds)})"
    if not (shown := measurements(result.protocol, result.numbers)):
        return f"{result.protocol}: done{took}"
    values = ", ".join(f"{name} {shown[0].text(name)}" for name in shown[0].values)
    return f"{result.protocol}: {shown[0].title} {values}{took}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> None:
    """As a table if it fits the terminal, else (in a file, in a narrow window) as Markdown, whose lines wrap better."""
    table = Table()
    for column, name in enumerate(head):
        table.add_column(Text(name), justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    whole = Width.get(console, console.options.update(max_width=1_000), table).maximum
    if console.is_terminal and whole <= console.width:
        console.print(table)
        return
    for line in markdown_lines(head, rows, left):
        console.print(line, markup=False)


def markdown_lines(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """A table in Markdown with aligned columns; those in `left` are aligned left."""
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    padded = [
        [text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]
