"""Predictions in the terminal."""

from rich.table import Table

from tico_ssl.classifying.predict import Predictions
from tico_ssl.runtime.progress import console, say
from tico_ssl.runtime.wording import counted

SHOWN_RANKS = 3


def print_predictions(found: Predictions, out: str | None) -> None:
    """What was written, or a short table; bad files; and how fast it went."""
    if out is None:
        _print_rows(found)
    for name, reason in found.first_bad:
        say(f"  passed over {name}: {reason}")
    if found.unreadable > len(found.first_bad):
        say(f"  ... and {found.unreadable - len(found.first_bad):,} more")
    if found.bad_file is not None:
        say(f"bad files  {found.bad_file}")
    before = f", {found.before:,} of them by an earlier command" if found.before else ""
    wrote = "" if out is None else f"wrote {out}: "
    say(f"{wrote}{counted(found.images, 'image')}{before}, {found.seconds:,.1f} s, {found.speed:,.0f} images/s")


def _print_rows(found: Predictions) -> None:
    table = Table("file", "class", "probability", "then", box=None)
    table.columns[0].overflow = "fold"  # a name differs from others at its end
    table.columns[2].justify = "right"
    for file, name, probability, *others in found.first:
        then = [f"{other} {100 * float(p):.1f} %" for other, p in zip(others[::2], others[1::2])]
        table.add_row(str(file), str(name), f"{100 * float(probability):.1f} %", ", ".join(then[: SHOWN_RANKS - 1]))
    console.print(table)
    if found.images > len(found.first):
        say(f"... and {found.images - len(found.first):,} more: --out predictions.csv writes them all")
        common = ", ".join(f"{name} {count:,}" for name, count in found.by_class.most_common(10))
        say(f"most often: {common}")
