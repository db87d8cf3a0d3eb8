"""Markdown tables of the generated pages."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a line break in a cell is a space, and a bar does not end it."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows])


def cell(text: str) -> str:
    """Text on one line, without bars outside code."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    """A value as code."""
    return f"`{value}`"
