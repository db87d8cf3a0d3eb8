"""Errors that a user can cause: one line, with the nearest valid name. And memory that does not suffice."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

# What libraries say of memory that cannot be had, and of sizes that are beyond all memory.
MEMORY_WORDS = re.compile(
    r"can't allocate memory|out of memory|unable to allocate|ALLOC_FAILED|size calculation overflowed|"
    r"multiplication overflow|overflow when unpacking|int too large to convert|array is too big|dimension exceeded",
    re.IGNORECASE,
)


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it as one line and exits with its code."""

    exit_code = 2


def suggestion(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' for a similar valid name, else the list of valid names."""
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""


def shortage(error: BaseException) -> str | None:
    """Which memory is exhausted, in a few words; None for an error of another kind."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, UserError) or not MEMORY_WORDS.search(str(error)):
        return None
    on_gpu = "CUDA" in str(error) or type(error).__name__ == "OutOfMemoryError"
    return "out of GPU memory" if on_gpu else "out of memory"


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """An exhausted memory as a UserError that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        if (which := shortage(error)) is None:
            raise
        raise UserError(f"{which}: {advice}") from error
