"""Options as their reader knows them. Messages call them as the command line does, `--data`; in a Python program, where
nobody has typed that, they name the argument, `data=`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

OTHER_NAMES = {"query": "queries"}  # of arguments that take several at once
SWITCHES = {"resume", "overwrite", "again", "bf16", "jpeg"}  # options without a value
# What is in backticks is a command, or code, and stays as it is.
_FLAG = re.compile(r"(?P<quoted>`[^`]*`)|(?<![\w-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])=?")
_commands = 0  # of the command line that are at work in this process: a number, so that they can be nested


@contextmanager
def command_line() -> Iterator[None]:
    """Within, messages are read by someone who has typed a command."""
    global _commands
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def worded(message: str) -> str:
    """A message with the options as flags within a command, as arguments elsewhere."""
    return message if _commands else _FLAG.sub(_as_argument, message)


def _as_argument(found: re.Match[str]) -> str:
    if found["quoted"]:
        return found["quoted"]
    name = OTHER_NAMES.get(found["name"], found["name"].replace("-", "_"))
    return f"{name}=True" if name in SWITCHES else f"{name}="
