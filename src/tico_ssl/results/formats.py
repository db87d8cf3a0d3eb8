"""A table as Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tico_ssl.results.table import Sheet, markdown_lines
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")  # the apostrophe itself, so that removing one gives the text back
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


def as_markdown(sheet: Sheet) -> str:
    """A table in Markdown, its columns aligned, with its notes."""
    lines = markdown_lines(sheet.head, sheet.texts, sheet.left)
    return "\n".join([*lines, "", *(f"- {note}" for note in sheet.notes), ""])


def as_csv(sheet: Sheet) -> str:
    """A line per row. Numbers are not rounded; standard deviations and intervals have columns of their own."""
    columns = range(len(sheet.head))
    several = [any(row[i].deviation is not None for row in sheet.rows) for i in columns]
    between = [any(row[i].interval is not None for row in sheet.rows) for i in columns]
    before = ""
    head = []
    for column, (name, spread, ends) in enumerate(zip(sheet.head, several, between)):
        before = before if column in sheet.beside else name
        whole = f"{before} {name}" if column in sheet.beside else name
        head += [
            whole,
            *([f"{whole} deviation"] if spread else []),
            *([f"{whole} low", f"{whole} high"] if ends else []),
        ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(safe_cell, head))
    for row in sheet.rows:
        line: list[Any] = []
        for cell, spread, ends in zip(row, several, between):
            line.append(safe_cell(cell.text) if cell.value is None else cell.value)
            line += [cell.deviation] if spread else []
            line += (cell.interval or (None, None)) if ends else ()
        writer.writerow(line)
    return text.getvalue()


def require_kind(out: Path, kinds: Iterable[str], what: str) -> None:
    """Refuse a file whose kind, by its ending, cannot be written, and what is there already and no file."""
    if out.suffix not in (known := sorted(kinds)):
        raise UserError(f"{out}: {what} are written as {', '.join(known)}")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(f"{out}: parquet needs pyarrow: {install_command('parquet')}")
    if out.exists() and not out.is_file():
        raise UserError(f"{out} exists and is not a regular file: choose another --out")


def safe_cell(text: str) -> str:
    """The text of a CSV cell; an apostrophe before one that a spreadsheet would take for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def as_latex(sheet: Sheet) -> str:
    """A tabular for the booktabs package."""
    columns = "".join("l" if i in sheet.left else "r" for i in range(len(sheet.head)))
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_line(sheet.head), r"\midrule"]
    lines += [_latex_line(row) for row in sheet.texts]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines + [f"% {note}" for note in sheet.notes]) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(cell) for cell in cells) + r" \\"


def latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(LATEX.get(letter, letter) for letter in text.replace("\n", " "))


FORMATS: dict[str, Callable[[Sheet], str]] = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}
