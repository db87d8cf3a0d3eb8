"""Verbs that show: report, compare, list, describe, cache."""

from typing import Annotated

import typer

from tico_ssl.cli import _completing as completing
from tico_ssl.cli._app import DataOption, changes_of, verb
from tico_ssl.runtime.printing import printable_lines

LISTS = ("recipes", "studies", "methods", "views", "data", "backbones", "evaluations", "exporting")


@verb("tico report runs/mine")
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or a study folder; anything else is skipped.")
    ],
    data: DataOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder to write to; by default the run's, `report` for several."),
    ] = None,
    points: Annotated[
        int, typer.Option(metavar="N", min=0, help="Images on the map of a run; 0: no map and no gallery.")
    ] = 10_000,
) -> None:
    """Write an HTML report. It is one self-contained file; its figures are also written as SVG and PNG."""
    from tico_ssl.report import report as write
    from tico_ssl.runtime.progress import say

    path = write(runs, out, data, points)
    say(f"wrote      {path} ({path.stat().st_size / 2**20:.1f} MiB), {path.parent / 'figures'}")
    say("next       open it in a browser; it needs no network")


@verb("tico compare runs/a runs/b --format markdown")
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders or study folders; anything else is skipped.")
    ],
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="markdown, csv or latex; by default a terminal table.",
            autocompletion=completing.one_of("markdown", "csv", "latex"),
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="File to write: .md, .csv or .tex; by default the terminal.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All metrics of every protocol; by default the first of each.")
    ] = False,
) -> None:
    """Compare runs in one table. A row per recipe, with mean and standard deviation over seeds."""
    from tico_ssl.results.comparison import compare as measure
    from tico_ssl.results.comparison import show
    from tico_ssl.runtime.progress import say

    comparison, text = measure(runs, format, out, every)
    if out is not None:
        say(f"wrote      {out}")
    elif format is not None:
        typer.echo(printable_lines(text), nl=False)
    else:
        show(comparison)


@verb("tico list backbones resnet", name="list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[WHAT]",
            help="recipes, studies, methods, views, data, backbones, evaluations or exporting; by default all.",
            autocompletion=completing.one_of(*LISTS),
        ),
    ] = "all",
    search: Annotated[str, typer.Argument(metavar="[TEXT]", help="Only names that contain this; by default all.")] = "",
) -> None:
    """List recipes, methods, backbones, data, evaluations and more."""
    from tico_ssl.listing import print_catalogue

    print_catalogue(what, search)


@verb("tico describe cifar10/tico method=simclr")
def describe(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A packaged recipe or study, or a YAML file.",
            autocompletion=completing.recipe_or_study,
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Overrides.")] = None,
) -> None:
    """Print a recipe or a study with every field explained. The output is itself a recipe."""
    from tico_ssl.listing import describe as in_words

    typer.echo(printable_lines(in_words(recipe, changes_of(overrides or []))))


@verb("tico cache --limit 20G")
def cache(
    which: Annotated[str, typer.Argument(metavar="[TEXT]", help="Only entries with this text, such as a path.")] = "",
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Set the size limit, such as 20G, and remove what exceeds it; by default the limit stays as it is.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove entries that no command uses now.")] = False,
) -> None:
    """Show, limit or clear what is cached between commands, mostly decoded images."""
    from tico_ssl.runtime import cache_folder
    from tico_ssl.runtime.progress import say

    if limit is not None:
        cache_folder.set_limit(limit)
    held = cache_folder.entries()
    for entry in held:
        if which in entry.what:
            gone = clear and cache_folder.remove(entry.folder)
            state = "removed  " if gone else "in use   " if clear else f"{entry.days_unused:3.0f} days "
            say(f"{entry.bytes / 1e9:8.2f} GB  {state} {entry.what}")
    total = sum(entry.bytes for entry in cache_folder.entries())
    say(f"{total / 1e9:8.2f} GB of {cache_folder.limit() / 1e9:,.0f} GB in {cache_folder.cache_folder()}")
    say("next       tico cache --limit 20G, tico cache --clear")
