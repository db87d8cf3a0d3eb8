"""Where a training shows its numbers besides its own files: what all such places have in common."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError, refusal
from tico_ssl.runtime.extras import install_command, installed
from tico_ssl.runtime.progress import say

Ending = Literal["finished", "stopped", "failed"]


def require_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose library is missing."""
    for name in names:
        if not installed(name):
            raise UserError(f"training.loggers: {name} is not installed: {install_command(name)}")


class Logger(ABC):
    """Numbers and images of a training, for somebody's display. At its first failure it ends, with a warning: training
    goes on, and metrics.jsonl has the same numbers."""

    title: str
    """What ends, in the warning."""

    def __init__(self, run: Run, start: int, warn: Callable[[str], None] = say) -> None:
        self.run, self.start, self._warn, self._ended = run, start, warn, False
        self._attempt(self._open)

    def add(self, record: dict[str, Any]) -> None:
        """The numbers of a step."""
        self._attempt(lambda: self._add(record["step"], {key: record[key] for key in record if key != "step"}))

    def show(self, name: str, picture: Path) -> None:
        """An image."""
        self._attempt(lambda: self._show(name, picture))

    def close(self, ending: Ending) -> None:
        """Write what is left, and say how training ended."""
        self._attempt(lambda: self._close(ending))
        self._ended = True

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._ended:
            return
        try:
            work()
        except Exception as error:  # of any library, about any network, disk or account
            self._ended = True
            reason = refusal(error) or str(error).strip() or type(error).__name__
            self._warn(f"warning: {self.title} end here: {reason.splitlines()[0]}")

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _add(self, step: int, values: dict[str, Any]) -> None: ...

    @abstractmethod
    def _show(self, name: str, picture: Path) -> None: ...

    @abstractmethod
    def _close(self, ending: Ending) -> None: ...


class Tracker(Logger):
    """A logger whose run has an identity elsewhere. Identity and the last step of every number are kept in the run
    folder, so that a resumed run goes on in the same place and sends nothing twice."""

    library: str

    @property
    def file(self) -> Path:
        """What is kept in the run folder."""
        return self.run.folder / f"{self.library}.json"

    def _open(self) -> None:
        known: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        self._sent: dict[str, int] = known.get("sent", {})
        self._identity = self._begin(known.get("id"))
        self._keep()

    def _add(self, step: int, values: dict[str, Any]) -> None:
        new = {name: value for name, value in values.items() if step > self._sent.get(name, -1)}
        if new:
            self._sent |= dict.fromkeys(new, step)
            self._keep()
            self._send(step, new)

    def _keep(self) -> None:
        """At every record, so without waiting for the disk: what a power failure loses is sent twice."""
        temporary = self.file.with_suffix(".json.tmp")
        temporary.write_text(json.dumps({"id": self._identity, "sent": self._sent}), encoding="utf-8")
        temporary.replace(self.file)

    @property
    def place(self) -> str:
        """Name of what runs belong to: the folder that contains the run folder."""
        return self.run.folder.resolve().parent.name or "tico"

    @abstractmethod
    def _begin(self, identity: str | None) -> str:
        """Start a run, or go on with one; its identity."""

    @abstractmethod
    def _send(self, step: int, values: dict[str, Any]) -> None: ...
