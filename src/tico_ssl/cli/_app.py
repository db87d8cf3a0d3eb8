"""The application that verbs are added to, and what several of them take."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tico_ssl.cli._completing import one_of
from tico_ssl.cli._help import Verb, Verbs
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import command_line

Function = TypeVar("Function", bound=Callable[..., None])

app = typer.Typer(
    cls=Verbs,
    help="Self-supervised pretraining of vision backbones with TiCo, from a folder of images to an evaluated model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(asked: bool) -> None:
    if asked:
        from tico_ssl import __version__

        typer.echo(f"tico-ssl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    context.with_resource(command_line())


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a backbone .safetensors file.")]
DATA_FORMS = "A folder, packed file, tar shards, parquet or a name (`tico list data`)"
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="IMAGES",
        help=f"{DATA_FORMS}; by default the data of the recipe or run. Repeatable.",
    ),
]
BF16Option = Annotated[
    bool,
    typer.Option(
        "--bf16",
        help="Compute frozen features in bf16: less exact; faster on GPUs and on CPUs that have it (`tico doctor`).",
    ),
]
SlurmOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=VALUE,...",
        help="Submit to SLURM instead: partition, nodes (by default 1), gpus and tasks per node (by default no GPU; a "
        "task per GPU), cpus per task, time (minutes or D-HH:MM:SS; by default a day), account, qos, mem, constraint, "
        "gres, nodelist, exclude.",
    ),
]
RECIPE_WORDS = "[RECIPE] [KEY=VALUE ...]"
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Images, as for --data.")]
SplitOption = Annotated[
    str,
    typer.Option(
        metavar="SPLIT",
        help="Images of one split: train, val or test; by default all.",
        autocompletion=one_of("train", "val", "test", "all"),
    ),
]


def verb(example: str, name: str | None = None, of: typer.Typer = app) -> Callable[[Function], Function]:
    """Make a function a verb, whose help ends with an example."""
    return of.command(name, cls=Verb, epilog=f"\b\nExample:\n  {example}")


def command(*words: object) -> str:
    """A command as a shell takes it: what has spaces or quotes in it is quoted."""
    return shlex.join(["tico", *map(str, words)])


def data_words(data: Sequence[str] | None) -> list[str]:
    """The given data as options of another command."""
    return [word for place in data or [] for word in ("--data", place)]


def exit_code(stop: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM."""
    return int(getattr(stop, "exit_code", 130))


def split_words(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """The recipe and the overrides."""
    from tico_ssl.config.recipe import is_override

    names = [word for word in words if not is_override(word)]
    if len(names) > 1:
        there = [name for name in names[1:] if Path(name).expanduser().exists()]
        images = f"; images are given with --data {shlex.quote(there[0])}" if there else ""
        raise UserError(f"expected one recipe, got {', '.join(names)}; overrides are written key=value{images}")
    return (names[0] if names else None), changes_of(word for word in words if is_override(word))


def changes_of(words: Iterable[str]) -> dict[str, Any]:
    """Overrides by key; the last one for a key counts."""
    from tico_ssl.config.recipe import parse_override

    return dict(parse_override(word) for word in words)
