"""Progress bars on a terminal, nothing elsewhere."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from tico_ssl.runtime.launcher import launched, launched_rank
from tico_ssl.runtime.printing import printable_lines

T = TypeVar("T")


class SafeConsole(Console):
    """A console whose text cannot command the terminal, whoever named what is printed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Everything that is printed comes through here; the console's own control codes are not text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


console = SafeConsole(highlight=False, soft_wrap=True, emoji=False)


def is_main() -> bool:
    """Whether this process prints; also valid before torch is imported and after the process group has ended."""
    if launched():
        return launched_rank() == 0
    distributed = sys.modules.get("tico_ssl.runtime.distributed")
    return distributed is None or bool(distributed.is_main())


def say(text: str = "") -> None:
    """Print a line, in the main process only. An output that takes no more (a full disk, a closed terminal) does not
    stop the work."""
    if is_main():
        with suppress(OSError):
            console.print(text, markup=False)


def bar(*columns: TextColumn) -> Progress:
    """A progress bar, silent without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal and is_main()),
        transient=True,
        expand=True,
    )


def track(items: Iterable[T], total: int, label: str | None) -> Iterator[T]:
    """The items, with a progress bar if there is a label."""
    if label is None:
        yield from items
        return
    with bar() as progress:
        task = progress.add_task(label, total=total)
        for item in items:
            yield item
            progress.advance(task)
