"""Options as their reader knows them, and nouns with their number. Messages call options as the command line does,
`--data`; in a Python program, where nobody has typed that, they name the argument, `data=`."""

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


def counted(number: int | str, noun: str) -> str:
    """1 image, 2 images, 1,000 classes, ? epochs: a number and its noun, which is given in the singular."""
    written = number if isinstance(number, str) else f"{number:,}"
    return f"{written} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    """By the rules of English spelling; an epoch ends in a k, unlike a batch."""
    if noun.endswith(("s", "x", "sh", "tch")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"
