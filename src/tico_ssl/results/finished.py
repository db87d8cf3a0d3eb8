"""Results that need not be computed again."""

from collections.abc import Iterable
from dataclasses import MISSING, fields

from tico_ssl.results.record import Line, Result, is_result, told_apart

SAME = ("protocol", "settings", "checkpoint", "seed", "images")


def finished(lines: Iterable[Line], like: Result) -> Result | None:
    """The latest of these results by the same protocol and settings, of the same checkpoint on the same images and
    labels. What a protocol adds to the description of its data does not count. Without a digest, none is known."""
    names = [field.name for field in fields(Result)]
    needed = [field.name for field in fields(Result) if field.default_factory is MISSING]  # older lines have no more
    same = [
        line
        for line in lines
        if line.get("images") is not None
        and is_result(line)
        and all(name in line for name in needed)
        and all(line[name] == getattr(like, name) for name in SAME)
        and told_apart(line["data"]) == told_apart(like.data)
        and like.data.items() <= line["data"].items()
    ]
    return Result(**{name: same[-1][name] for name in names if name in same[-1]}) if same else None
