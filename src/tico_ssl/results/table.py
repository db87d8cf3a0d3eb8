"""Tables in the terminal: of an evaluation, or of any head and rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

from tico_ssl.results.confidence import Interval
from tico_ssl.results.metrics import WAYS, Measurement, Quantity, measurements
from tico_ssl.results.record import Line, Result, duration, images_of, split_in_words
from tico_ssl.results.verdict import gain_interval, signed, verdict
from tico_ssl.runtime.progress import console
from tico_ssl.runtime.wording import counted

OWN = ("trained", "initial", "untrained", "pixels")  # columns of every run, in order; other models come after them
FRAME = 3  # characters around a cell: a rule and two spaces


@dataclass(frozen=True)
class Cell:
    """Text of a cell, and its number if it has one."""

    text: str
    value: float | None = None
    deviation: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Sheet:
    """A table with notes."""

    head: list[str]
    rows: list[list[Cell]]
    notes: list[str]
    beside: Collection[int] = field(default=(), kw_only=True)
    """Columns that belong to the one before, such as `untrained`."""

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
    found = dict.fromkeys(name for result in results for name in result.numbers)
    names = [*(name for name in OWN if name in found), *(name for name in found if name not in OWN)]
    lines = [result.line for result in results]
    of_lines = [(line, one) for line in lines for one in measurements(line["protocol"], line["numbers"])]
    every = [one for _, one in of_lines]
    columns = {name: [one.text(name) for one in every] for name in names}
    if {"trained", "untrained"} <= found.keys():
        reference, title = ("initial", "over initial") if "initial" in found else ("untrained", "difference")
        others = {name: columns.pop(name) for name in names if name not in OWN}  # come last
        columns |= {title: [_difference(line, one, reference) for line, one in of_lines]} | others
    head = ["protocol", *columns]
    rows = [[one.row_title, *texts] for one, texts in zip(every, zip(*columns.values()), strict=True)]
    console.print()
    console.print(_title(results[0]))
    print_table(head, rows, left=[0], drawn=True)
    for sentence in legend(every, any("[" in text for row in rows for text in row)):
        console.print(sentence)
    if (said := verdict(lines)) is not None:
        console.print(str(said))


def _difference(line: Line, found: Measurement, reference: str) -> str:
    gain = found.gain_over(reference)
    return "" if gain is None else with_interval(gain, gain_interval(line, found, reference), found.metric.digits)


def with_interval(difference: float, interval: Interval | None, digits: int) -> str:
    """+9.5 [+6.3, +12.7], or without what is not known."""
    ends = "" if interval is None else f" [{', '.join(signed(end, digits) for end in interval)}]"
    return signed(difference, digits) + ends


def legend(shown: Sequence[Quantity], with_intervals: bool = False) -> list[str]:
    """What the signs in the table mean, of those that are in it."""
    ways = {"higher": "higher is better", "lower": "lower is better", "near 1": "nearer 1 is better"}
    found = {one.metric.better for one in shown}
    words = [f"{WAYS[way]} {meaning}" for way, meaning in ways.items() if way in found]
    words += ["no sign: neither way is better"] if None in found else []
    words += ["in brackets: only between runs of one kind"] if any(one.metric.among_runs for one in shown) else []
    words += ["[low, high]: 95 % interval over test images"] if with_intervals else []
    return [f"{'; '.join(words)}."] if words else []


def _title(result: Result) -> str:
    data = result.data
    train, test = images_of(data, "train"), images_of(data, "test")
    images = f"{train:,} training and {counted(test or 0, 'test image')} ({split_in_words(data)})"
    return f"{data['source']}: {'a quick look at ' if data.get('quick') else ''}{images}"


def in_a_line(result: Result) -> str:
    """The first metric of a result."""
    took = f" ({duration(result.seconds)})"
    if not (shown := measurements(result.protocol, result.numbers)):
        return f"{result.protocol}: done{took}"
    values = ", ".join(f"{name} {shown[0].text(name)}" for name in shown[0].values)
    return f"{result.protocol}: {shown[0].title} {values}{took}"


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[int],
    beside: Collection[int] = (),
    drawn: bool = False,
) -> None:
    """On a terminal, or if `drawn`, as a table, else (in a file, in a pipe) as Markdown. One that is too wide becomes
    several, one below the other, each with the first column; those in `beside` stay with the one before."""
    widths = [max(map(cell_len, column)) for column in zip(head, *rows)]
    for number, columns in enumerate(_fitting(widths, beside, console.width)):
        if number:
            console.print()
        aligned = [place for place, column in enumerate(columns) if column in left]
        _print_part([head[i] for i in columns], [[row[i] for i in columns] for row in rows], aligned, drawn)


def _fitting(widths: Sequence[int], beside: Collection[int], most: int) -> list[list[int]]:
    """Columns of as few tables as have room for all in this width."""
    units: list[list[int]] = []
    for column in range(1, len(widths)):
        if column in beside and units:
            units[-1].append(column)
        else:
            units.append([column])
    tables: list[list[int]] = [[0]]
    for unit in units:
        whole = 1 + sum(widths[column] + FRAME for column in (*tables[-1], *unit))
        if whole > most and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1] += unit
    return tables


def _print_part(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int], drawn: bool) -> None:
    table = Table()
    for column, name in enumerate(head):
        table.add_column(Text(name), justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    whole = Width.get(console, console.options.update(max_width=1_000), table).maximum
    if (drawn or console.is_terminal) and whole <= console.width:
        console.print(table)
        return
    for line in markdown_lines(head, rows, left):  # whose lines wrap better
        console.print(line)


def markdown_lines(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """A table in Markdown with aligned columns; those in `left` are aligned left."""
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in (head, *rows)]
    widths = [max(2, *map(len, column)) for column in zip(*cells)]  # a rule with a colon has a hyphen too
    rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    padded = [
        [text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]
