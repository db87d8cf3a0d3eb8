"""Errors that a user can cause or put right, each in one line: mistakes, and what the machine refuses. And the end of
what was asked to stop."""

import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import worded

REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "choose another folder",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
UNFINISHED = re.compile(r"((\.[0-9a-f]{8})?\.tmp)+$|\.partial$")  # after the name of a file that is being written
# What libraries raise instead of an OSError when a file cannot be written: torch.save, safetensors.
WRITER_WORDS = re.compile(r"inline_container|PytorchStreamWriter|Parent directory .* does not exist|\(os error \d+\)")
NO_HOME = "Could not determine home directory."  # what Path.expanduser raises, of ~ and of ~somebody
# What libraries say of memory that cannot be had, and of sizes that are beyond all memory.
MEMORY_WORDS = re.compile(
    r"can't allocate memory|out of memory|unable to allocate|ALLOC_FAILED|size calculation overflowed|"
    r"multiplication overflow|overflow when unpacking|int too large to convert|array is too big|dimension exceeded",
    re.IGNORECASE,
)


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it as one line and exits with its code. Options are
    written `--data`, which becomes `data=` in a Python program. Names in the message may come from anyone's files, so
    it is made safe to print."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(worded(message)))


class Interrupted(KeyboardInterrupt):
    """Work was asked to stop by a signal, and has kept its state."""

    def __init__(self, text: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(worded(text))
        self.exit_code = 128 + number
        """As a shell reports it: 130 after Ctrl-C, 143 after SIGTERM."""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' for a similar valid name or those that it is the end of, else the list of valid names."""
    valid = sorted(valid)
    near = get_close_matches(name, valid, n=1, cutoff=0.6)
    if near := [one for one in valid if one.endswith(f"/{name}")] or near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; valid: {', '.join(valid)}" if valid else ""


def refusal(error: BaseException) -> str | None:
    """Why the system refused to read or write a file, and what to do, in one line; None if it is not that."""
    if isinstance(error, OSError):
        return _os_words(error)
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        return "a path begins with ~, and there is no such home folder: write the path in full"
    if not WRITER_WORDS.search(str(error)):
        return None
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return _os_words(OSError(int(found[1]), os.strerror(int(found[1]))))
    cause = error.__context__  # torch fails a second time when it closes the file
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return "the file could not be written whole: is the disk full?" if cause is None else _os_words(cause)


def _os_words(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{UNFINISHED.sub('', os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
    remedy = REMEDIES.get(error.errno or 0)
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")


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


def signal_name(number: int) -> str:
    """SIGKILL for 9; a signal without a name by its number."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def told(error: Exception) -> int:
    """Tell an error in one line on stderr: the exit code of the process. An error of the program is raised again."""
    if (line := one_line(error)) is None:
        raise error
    sys.stderr.write(f"error: {line}\n")
    return int(getattr(error, "exit_code", UserError.exit_code))


def one_line(error: BaseException) -> str | None:
    """An error that needs no traceback, in one line; None for an error of the program."""
    line = str(error) if isinstance(error, UserError) else refusal(error) or shortage(error)
    return None if line is None else printable(re.sub(r"\s*\n\s*", " ", line))  # libraries' reasons may have several
