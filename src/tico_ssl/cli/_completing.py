"""Values that a shell completes when Tab is pressed. Like every answer of the command line that computes nothing, they
come without torch. Where no value begins with what was typed, the shell completes the names of files as usual."""

from collections.abc import Callable, Iterable

import typer

Complete = Callable[[typer.Context, str], list[str]]


def _of(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]


def one_of(*values: str) -> Complete:
    """One of a few values."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        return _of(incomplete, values)

    return complete


def recipe(context: typer.Context, incomplete: str) -> list[str]:
    """A packaged recipe, unless one is there already; overrides follow it."""
    from tico_ssl.config.recipe import packaged_recipes

    return [] if _given(context) else _of(incomplete, packaged_recipes())


def study(context: typer.Context, incomplete: str) -> list[str]:
    """A packaged study, unless one is there already."""
    from tico_ssl.config.study import packaged_studies

    return [] if _given(context) else _of(incomplete, packaged_studies())


def recipe_or_study(context: typer.Context, incomplete: str) -> list[str]:
    """What `tico describe` takes."""
    return [*recipe(context, incomplete), *study(context, incomplete)]


def protocol(context: typer.Context, incomplete: str) -> list[str]:
    """Protocols of evaluation that are not there yet."""
    from tico_ssl.config import catalogue

    given = _given(context)
    return [name for name in _of(incomplete, ["all", *catalogue.entries("evaluations")]) if name not in given]


def export_format(context: typer.Context, incomplete: str) -> list[str]:
    """Formats of `tico export`."""
    from tico_ssl.config import catalogue

    return _of(incomplete, catalogue.entries("exporting"))


def _given(context: typer.Context) -> list[str]:
    """The words before this one that are no overrides."""
    from tico_ssl.config.recipe import is_override

    return [word for word in context.params.get("words") or [] if not is_override(word)]
