"""Progress: bars on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column

from tico_ssl.runtime.launcher import launched, launched_rank
from tico_ssl.runtime.printing import printable_lines
from tico_ssl.runtime.wording import worded

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 20.0  # of progress, without a terminal
BAR = 16  # columns of a terminal


class SafeConsole(Console):
    """A console whose text cannot command the terminal, whoever named what is printed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Everything that is printed comes through here; the console's own control codes are not text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


console = SafeConsole(highlight=False, soft_wrap=True, emoji=False, markup=False)


def is_main() -> bool:
    """Whether this process prints; also valid before torch is imported and after the process group has ended."""
    if launched():
        return launched_rank() == 0
    distributed = sys.modules.get("tico_ssl.runtime.distributed")
    return distributed is None or bool(distributed.is_main())


def say(text: str = "") -> None:
    """Print a line, in the main process only; options in it are written as in a UserError. An output that takes no more
    (a full disk, a closed terminal) does not stop the work."""
    if is_main():
        with suppress(OSError):
            console.print(worded(text))


def words(field: str) -> TextColumn:
    """A column for a bar, of text that takes what room there is, and is cut where there is none."""
    room = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return TextColumn(f"{{task.fields[{field}]}}", markup=False, table_column=room)


def bar(*columns: TextColumn) -> Progress:
    """A progress bar, silent without a terminal. Steps and time left come first, for narrow terminals."""
    whole = Column(no_wrap=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=BAR),
        MofNCompleteColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        *columns,
        console=console,
        disable=not (console.is_terminal and is_main()),
        transient=True,
        expand=True,
    )


def track(
    items: Iterable[T],
    total: int,
    label: str | None,
    unit: str = "",
    amount: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:
    """The items, with speed and time left if there is a label: a progress bar, or a line now and then where there is no
    terminal. An item may count for more than one unit of the total."""
    if label is None:
        yield from items
        return
    pace = _Pace(label, total, unit)
    with bar(words("speed")) as progress:
        task = progress.add_task(label, total=total, speed="")
        for item in items:
            yield item
            pace.advance(amount(item))
            progress.update(task, completed=pace.done, speed=pace.speed())
            if progress.disable and pace.line_due():
                say(pace.line())


class _Pace:
    """How fast something goes, in words."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self._start = 0, monotonic()
        self._next = self._start + SECONDS_BETWEEN_LINES

    def advance(self, amount: int) -> None:
        self.done += amount

    def speed(self) -> str:
        """Units per second since the start."""
        return f"{self._rate():,.{0 if self._rate() >= 10 else 1}f} {self.unit}".rstrip() + "/s"

    def line_due(self) -> bool:
        """Whether a line should be printed; ask once per line."""
        due = monotonic() >= self._next and 0 < self.done < self.total
        if due:
            self._next = monotonic() + SECONDS_BETWEEN_LINES
        return due

    def line(self) -> str:
        """Progress, speed and time left."""
        left = timedelta(seconds=round((self.total - self.done) / max(self._rate(), 1e-9)))
        counted = f"{self.done:,} of {self.total:,} {self.unit}".rstrip()
        return f"{self.label}: {counted}, {self.speed()}, {left} left"

    def _rate(self) -> float:
        return self.done / max(monotonic() - self._start, 1e-9)
