"""Errors that a user can cause: one line, with the nearest valid name."""

from collections.abc import Iterable
from difflib import get_close_matches

from tico_ssl.runtime.printing import printable


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it as one line and exits with code 2. Names in the
    message may come from anyone's files, so it is made safe to print."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def suggestion(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' for a similar valid name, else the list of valid names."""
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
