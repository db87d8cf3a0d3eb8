"""The page of the command line: every verb with its arguments and options, as `--help` has them."""

from collections.abc import Iterator
from typing import Any

import click
import typer
from tables import code, table

from tico_ssl.cli import app

INTRODUCTION = """# Command line

`tico VERB --help` prints the same. `KEY=VALUE` overrides a setting of a recipe or protocol by its dotted name; `tico
describe RECIPE` lists them all. `tico --install-completion` completes verbs, options and recipe names in bash, zsh,
fish and PowerShell.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | some runs of a study failed; `tico doctor`: the machine is not ready; `tico data check`: a file is unreadable |
| 2 | an error that the last line explains |
| 3 | training became NaN ([what to do](../runs.md#a-training-that-becomes-nan)) |
| 75 | another process of a distributed run was lost ([restarts](../scaling.md#stop-and-restart)) |
| 130, 143 | stopped by Ctrl-C, by SIGTERM |
"""


def page() -> str:
    """The page in Markdown."""
    return "\n\n".join([INTRODUCTION, *(section(name, command) for name, command in sorted(verbs()))])


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb by its words: `data check`."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


def section(name: str, command: Any) -> str:
    """One verb: usage, what it does, its words and options, an example."""
    given = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    words = [one for one in given if one.param_type_name == "argument"]
    options = [one for one in given if one.param_type_name == "option"]
    called = {one.metavar or one.name.upper(): one.help or "" for one in words}
    usage = " ".join(["tico", name, *called, *(["[OPTIONS]"] if options else [])])
    about = " ".join((command.help or "").replace("\b", "").split())
    parts = [f"## tico {name}", f"```text\n{usage}\n```", about]
    if words:
        parts.append(table(["argument", "meaning"], [(code(word), text) for word, text in called.items()]))
    if options:
        rows = [(code(spelled(one, command)), default(one), one.help or "") for one in options]
        parts.append(table(["option", "default", "meaning"], rows))
    if command.epilog:
        lines = [line.strip() for line in command.epilog.replace("\b", "").splitlines() if line.startswith("  ")]
        parts.append("Example:\n\n```sh\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


def spelled(option: Any, command: Any) -> str:
    """An option with what it takes, as `--help` spells it: `--epochs <int>`."""
    record = option.get_help_record(click.Context(command))
    return " ".join(record[0].split()) if record else str(option.opts[0])


def default(option: Any) -> str:
    """A default that is a value; others are explained by the option's text."""
    if option.default is None or option.default == "" or option.default == ():
        return ""
    return "off" if option.default is False else "on" if option.default is True else code(option.default)
