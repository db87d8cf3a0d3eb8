"""Training state on disk, written atomically, and stop requests (Ctrl-C, SIGTERM) that end with a checkpoint.

Data order, views and dropout are functions of seed and step (see `randomness`), so a checkpoint needs the step and no
random states.
"""

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from tico_ssl.optim.groups import load_optimizer
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically


def save_checkpoint(path: Path, step: int, method: nn.Module, optimizer: Optimizer, seconds: float) -> None:
    """Everything that a bitwise-identical resume needs."""
    state = {
        "step": step,
        "seconds": seconds,
        "method": method.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path, alone=True) as temporary:
        torch.save(state, temporary)


class Position(NamedTuple):
    """Where training continues: completed steps, and seconds spent."""

    step: int = 0
    seconds: float = 0.0


def restore(path: Path | None, method: nn.Module, optimizer: Optimizer, device: torch.device) -> Position:
    """Load a checkpoint if it exists, and return its position."""
    if path is None or not path.is_file():
        return Position()
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        method.load_state_dict(state["method"])
        load_optimizer(optimizer, state["optimizer"])
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path}: cannot be resumed from ({str(error).splitlines()[0]})") from error
    return Position(state["step"], state["seconds"])


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop and wrote a checkpoint."""


class StopRequest:
    """Ctrl-C or SIGTERM (a scheduler's warning) asks the loop to stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, self._previous[number])

    def agreed(self, at_log_step: bool) -> bool:
        """Whether to stop now. Several processes must stop at the same step, so they agree at log steps only."""
        if not distributed.active():
            return self.received
        return at_log_step and distributed.anyone(self.received)
