"""Errors that a user can cause: one line, with the nearest valid name. And the end of what was asked to stop."""

import signal
from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it as one line and exits with code 2."""


class Interrupted(KeyboardInterrupt):
    """Work was asked to stop by a signal, and has kept its state."""

    def __init__(self, text: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(text)
        self.exit_code = 128 + number
        """As a shell reports it: 130 after Ctrl-C, 143 after SIGTERM."""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' for a similar valid name, else the list of valid names."""
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
