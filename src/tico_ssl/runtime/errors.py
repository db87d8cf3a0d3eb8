"""The one kind of error that a user can cause, and the sentence that helps: one line, with the nearest valid name."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something that the user can put right. The command line prints it as one line and exits with 2."""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' when something valid is near, else the list of what is valid."""
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
