"""Progress of a training: a bar on a terminal, a few lines elsewhere."""

from types import TracebackType

from tico_ssl.runtime.progress import bar, words


class Display:
    """Progress of one training; without a terminal, at most `lines` lines."""

    def __init__(self, name: str, steps: int, start: int, lines: int = 20) -> None:
        self.steps, self.lines, self._shown = steps, lines, lines * start // max(1, steps)
        self._bar = bar(words("status"))
        self._task = self._bar.add_task(name, total=steps, completed=start, status="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, done: int) -> None:
        """Set the number of completed steps."""
        self._bar.update(self._task, completed=done)

    def status(self, text: str) -> None:
        """Text beside the bar."""
        self._bar.update(self._task, status=text)

    def line_due(self, done: int) -> bool:
        """Whether, without a bar, a progress line is due; ask once per line."""
        due = self.lines * done // self.steps
        if not self._bar.disable or due == self._shown:
            return False
        self._shown = due
        return True
