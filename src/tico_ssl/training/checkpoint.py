"""Training state on disk, verified and kept, and stop requests (Ctrl-C, SIGTERM) that end with a checkpoint.

Data order, views and dropout are functions of seed and step (see `randomness`), so a checkpoint needs the step and no
random states. A checkpoint is a file of torch.save, with a checksum of every tensor in it and a digest of all its bytes
at the end. The newest is `last.pt`; the one before it is `last.pt.1`, and so on.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from tico_ssl.optim.groups import load_optimizer
from tico_ssl.results.run_folder import installed_version
from tico_ssl.runtime import distributed
from tico_ssl.runtime.checksums import checksums, damage
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import is_sealed, seal, sync, written_atomically
from tico_ssl.runtime.progress import say

CPU = torch.device("cpu")
FORMAT = 1  # of a checkpoint: raise it when an older version would read it wrongly. Without a manifest it is 0
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
AGREE_SECONDS, AGREE_STEPS = 2.0, 64  # at most, between two questions whether to stop


def save_checkpoint(
    path: Path, step: int, method: nn.Module, optimizer: Optimizer, seconds: float, keep: int = 1
) -> None:
    """Everything that a bitwise-identical resume needs. Of earlier checkpoints `keep - 1` stay; the oldest is removed
    when the new one is on the disk and has been read back."""
    state = {
        "format": FORMAT,
        "version": installed_version("tico-ssl"),
        "step": step,
        "seconds": seconds,
        "method": method.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as temporary:
        _write(temporary, state | {"checksums": checksums(state)})
        sync(temporary)
        try:
            read_checkpoint(temporary, mmap=True)
        except Damaged as error:
            raise OSError(f"{path}: what was written reads back wrong ({error}); is the disk damaged?") from error
        _make_room(path, keep)


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
        seal(path)
    except RuntimeError as error:  # torch's own, about what it could not write
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _make_room(path: Path, keep: int) -> None:
    """Make every checkpoint one older, and remove those that are too old. A kill in between leaves a gap, no more."""
    older = kept(path)
    for file in older[keep - 1 :]:
        if file != path:  # which is about to be replaced
            file.unlink()
    for number, file in reversed(list(enumerate(older[: keep - 1], start=1))):
        os.replace(file, path.with_name(f"{path.name}.{number}"))  # noqa: PTH105 - atomic


def kept(path: Path) -> list[Path]:
    """The checkpoints that there are, the newest first."""
    older = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdecimal()]
    return [path] * path.is_file() + sorted(older, key=lambda file: int(file.suffix[1:]))


class Position(NamedTuple):
    """Where training continues: completed steps, and seconds spent."""

    step: int = 0
    seconds: float = 0.0


def restore(
    path: Path | None,
    method: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    tell: Callable[[str], None] = say,
) -> Position:
    """Load the newest checkpoint that is undamaged, if there is any, and return its position. Damaged ones are named
    and put aside."""
    damaged: dict[Path, str] = {}
    state: dict[str, Any] = {}
    for file in [] if path is None else kept(path):
        try:
            state = read_checkpoint(file, device)
        except Damaged as error:
            damaged[file] = str(error)
            continue
        _load(file, state, method, optimizer, tell)
        break
    position = Position(state.get("step", 0), state.get("seconds", 0.0))
    if len(set(distributed.everyone(position.step))) > 1:
        raise UserError(f"{path}: processes read different checkpoints; do all of them see the same folder?")
    if damaged and not state:
        reasons = "; ".join(f"{file}: cannot be resumed from ({reason})" for file, reason in damaged.items())
        raise UserError(f"{reasons}; there is no other checkpoint: without this file training starts again")
    for file, reason in damaged.items() if distributed.is_main() else ():
        tell(f"warning: {file} is damaged ({reason}); an earlier checkpoint is used, after step {position.step}")
        os.replace(file, file.with_name(f"{file.name}.damaged"))  # noqa: PTH105 - or it would be kept as a good one
    return position


class Damaged(Exception):
    """A checkpoint that is not what was written."""


def read_checkpoint(path: Path, device: torch.device = CPU, mmap: bool = False) -> dict[str, Any]:
    """The state in a checkpoint, on a device, verified. That of a version without checksums is taken as it is."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        manifest = state.pop("checksums", None)
        early = manifest is None and "format" not in state
        wrong = None if early else damage(state, manifest) or (None if is_sealed(path) else "bytes have changed")
    except PermissionError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        if _intact(path):
            raise  # out of memory, and the like
        raise Damaged(_line(error)) from error
    if wrong is not None:
        raise Damaged(wrong)
    return state


def _intact(path: Path) -> bool:
    try:
        return is_sealed(path)
    except OSError:  # a sector that cannot be read
        return False


def _load(
    file: Path, state: dict[str, Any], method: nn.Module, optimizer: Optimizer, tell: Callable[[str], None]
) -> None:
    """Load a verified state."""
    written = f"tico-ssl {state['version']}" if "version" in state else "an early version"
    here = installed_version("tico-ssl")
    if state.get("format", 0) > FORMAT:
        raise UserError(f"{file}: was written by {written}; this is {here}, which is too old to read it")
    if "format" not in state:
        tell(f"{file} is from a version without checksums: it is used unverified")
    try:
        method.load_state_dict(state["method"])
        load_optimizer(optimizer, state["optimizer"])
    except Exception as error:
        reason = f"it was written by {written}, this is {here} ({_line(error)})"
        raise UserError(f"{file}: cannot be resumed from: {reason}") from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class StopRequest:
    """Ctrl-C or a scheduler's warning (SIGTERM, SIGUSR1, SIGUSR2) asks the loop to stop; a second Ctrl-C stops at
    once. Other signals may come several times: from a scheduler to every process, and again from a launcher."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that was received, if any; of several processes, by any of them."""
        self._previous: dict[int, Any] = {}
        self._asked, self._next, self._then = 0, 1, time.monotonic()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = max(self.number, number)  # SIGTERM counts more than the warnings: see `runtime.slurm`
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])

    def agreed(self, made: int) -> bool:
        """Whether to stop now, after so many steps.

        Several processes must stop at the same step. They ask each other every two seconds, counted in steps of the
        slowest of them: the number of steps until the next question is then the same for all.
        """
        if not distributed.active():
            return self.number > 0
        if made < self._next:
            return False
        now = time.monotonic()
        pace = (now - self._then) / (made - self._asked)
        number, slowest = distributed.all_max([float(self.number), pace])
        self.number = int(number)
        self._asked, self._then = made, now
        self._next = made + max(1, min(AGREE_STEPS, int(AGREE_SECONDS / max(slowest, 1e-9))))
        return self.number > 0
