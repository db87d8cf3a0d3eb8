"""The command line: each verb a thin call of a public function."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from tico_ssl.runtime.errors import UserError

app = typer.Typer(
    help="Self-supervised pretraining of vision backbones with TiCo, from a folder of images to an evaluated model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

data_app = typer.Typer(help="Look at images, check them, pack them, verify the packed file.", no_args_is_help=True)
app.add_typer(data_app, name="data")

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a backbone .safetensors file.")]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="A folder, a file of images or a list of paths, or a name; more than once for several."
    ),
]
RecipeWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE ...]", help="A packaged recipe or a YAML file, then changes to it."),
]
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Whatever --data takes.")]


@app.command()
def pretrain(
    words: RecipeWords = None,
    data: DataOption = None,
    out: Annotated[str | None, typer.Option(help="The run folder; by default runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run if it exists, begin it if not.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run if it exists.")] = False,
) -> None:
    """Train a backbone. Without arguments: recipe `demo` on drawn textures, minutes on a CPU."""
    from tico_ssl.runtime.progress import is_main, say
    from tico_ssl.training.start import pretrain as train

    recipe, changes = _split(words or [])
    try:
        run = train(recipe or "demo", data, out, changes, resume, overwrite)
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped at once; --resume continues from the last checkpoint")
        raise typer.Exit(130) from stop
    if not is_main():
        return
    say(f"\nlook at    {run.folder}/views.png, {run.folder}/metrics.jsonl, tensorboard --logdir {run.folder}")
    say(f"backbone   {run.backbone_file}")
    labelled = any("knn" in key for line in run.metrics() for key in line)
    say(f"next       tico evaluate {run.folder} {'knn linear rankme' if labelled else 'rankme'}")


@app.command()
def evaluate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, a backbone file, or a model: torchvision/resnet50.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROTOCOL... [KEY=VALUE ...]", help="See `tico list evaluations`; then changes to their settings."
        ),
    ],
    data: DataOption = None,
    weights: Annotated[
        str | None, typer.Option(help="With a model's name: a file of its weights (.safetensors, .pth).")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything anew, and keep no features.")
    ] = False,
) -> None:
    """Evaluate a backbone, beside an untrained one of the same shape. `all`: by every protocol that the data allow."""
    from tico_ssl.evaluations._evaluate import evaluate_all, imported
    from tico_ssl.features.homes import home_of, is_model_name
    from tico_ssl.results.table import print_results
    from tico_ssl.runtime.progress import is_main, say

    protocols = [word for word in words if "=" not in word]
    if not protocols:
        raise UserError("by which protocol? See `tico list evaluations`")
    overrides = _changes(word for word in words if "=" in word)
    try:
        subject = run if weights is None else str(imported(run, weights, data))
        results = evaluate_all(subject, protocols, data, overrides, not no_cache)
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; the same command goes on")
        raise typer.Exit(130) from stop
    if not is_main():
        return
    print_results(results)
    say(f"\nadded to   {home_of(subject)}/results.jsonl")
    if not is_model_name(subject):
        say(f"use it     from tico_ssl import load_backbone; backbone = load_backbone({subject!r})")
    if Path(subject).expanduser().is_dir():
        say(f"next       tico report {subject}")


@app.command()
def embed(
    run: RunArgument,
    data: DataOption = None,
    out: Annotated[str, typer.Option(help="A .npz, .csv or .parquet file.")] = "features.npz",
) -> None:
    """Write the features of images, with their file names and labels."""
    from tico_ssl.features.embedding import embed as write
    from tico_ssl.runtime.progress import say

    say(f"wrote {write(run, data, out)}")


@app.command()
def export(
    run: RunArgument,
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="See `tico list exporting`.")],
    out: Annotated[str, typer.Option(help="The file to write.")] = "backbone.pth",
) -> None:
    """Write the backbone for another library."""
    from tico_ssl.exporting._writing import export_with_snippet
    from tico_ssl.runtime.progress import say

    snippet = export_with_snippet(run, format, out)
    say(f"wrote {out}; use it so:\n\n{snippet}")


@app.command()
def study(
    words: Annotated[
        list[str],
        typer.Argument(metavar="STUDY [KEY=VALUE ...]", help="See `tico list studies`; or a YAML file. Then changes."),
    ],
    data: DataOption = None,
    out: Annotated[str | None, typer.Option(help="The study's folder; by default runs/study-STUDY.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Make this run alone; more than once for several.")] = None,
    side_by_side: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default 3 on a GPU, 1 for every 4 threads of a CPU.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and what is done of them.")] = False,
) -> None:
    """Make many runs and compare them in one table. The same command goes on where it was stopped."""
    from tico_ssl.config.study import jobs
    from tico_ssl.runtime.progress import say
    from tico_ssl.studies import Workshop, table
    from tico_ssl.studies import study as make

    name, changes = _split(words)
    if name is None:
        raise UserError("which study? See `tico list studies`")
    if dry_run:
        workshop = Workshop.open(name, data, out, changes)
        workshop.show_plan(jobs(workshop.study, only))
        return
    try:
        summary = make(name, data, out, changes, only or (), side_by_side)
    except KeyboardInterrupt as stop:
        say("stopped; the same command goes on")
        raise typer.Exit(130) from stop
    table.show(summary)
    say(f"\nwrote      {summary.folder}/results.md, results.csv, results.json")
    if summary.failures:
        say(f"{len(summary.failures)} run(s) failed, see {summary.folder}/logs; the same command tries them again")
        raise typer.Exit(1)
    say(f"next       tico evaluate {summary.folder}/RUN PROTOCOL")


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="A run folder, several, or the folder of a study.")
    ],
    data: DataOption = None,
    out: Annotated[
        str | None, typer.Option(help="The folder to write to; by default the run's, and `report` for several.")
    ] = None,
    points: Annotated[
        int, typer.Option(min=0, help="Images on the map of one run; 0 leaves map and gallery out.")
    ] = 10_000,
) -> None:
    """Write report.html, one file that opens from disk, and its figures as SVG and PNG."""
    from tico_ssl.report import report as write
    from tico_ssl.runtime.progress import say

    path = write(runs, out, data, points)
    say(f"wrote      {path} ({path.stat().st_size / 2**20:.1f} MiB), {path.parent / 'figures'}")
    say("next       open it in a browser; it needs no network")


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of studies.")],
    format: Annotated[
        str | None, typer.Option(help="markdown, csv or latex; by default a table for the terminal.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write to this file; its suffix says how: .md, .csv, .tex.")] = None,
) -> None:
    """Show runs in one table: a row for each recipe, mean and deviation over its seeds."""
    from tico_ssl.results.comparison import compare as measure
    from tico_ssl.results.comparison import show
    from tico_ssl.runtime.progress import say

    comparison, text = measure(runs, format, out)
    if out is not None:
        say(f"wrote      {out}")
    elif format is not None:
        typer.echo(text, nl=False)
    else:
        show(comparison)


@app.command()
def bench(
    words: RecipeWords = None,
    data: DataOption = None,
    against: Annotated[
        str | None, typer.Option(help="Also time another library on the same images and network: lightly.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each measurement, about.", min=0)] = 2.0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also time steps through torch.compile, which takes minutes.")
    ] = False,
    out: Annotated[str | None, typer.Option(help="Also write what was measured to this JSON file.")] = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Also time a step of every method with this network and batch.")
    ] = False,
) -> None:
    """Measure how fast training is on this machine, how fast it could be, and where the time goes."""
    from tico_ssl.bench import bench as measure
    from tico_ssl.bench.table import print_report

    recipe, changes = _split(words or [])
    print_report(measure(recipe, data, changes, against, seconds, compiled, out, methods))


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="recipes, methods, backbones, data, views, ...")] = "all",
    search: Annotated[str, typer.Argument(metavar="TEXT", help="Show only names that contain this.")] = "",
) -> None:
    """Show what there is: recipes, studies, methods, backbones, data, views, evaluations, exporting."""
    from tico_ssl.listing import print_catalogue

    print_catalogue(what, search)


@app.command()
def describe(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe, a YAML file, or a study.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]")] = None,
) -> None:
    """Print a recipe or a study, every field with its meaning. The output is itself a recipe."""
    from tico_ssl.listing import describe as in_words

    typer.echo(in_words(recipe, _changes(overrides or [])))


@data_app.command()
def check(
    source: SourceArgument,
    channels: Annotated[int, typer.Option(help="Channels that the network wants.")] = 3,
    workers: Annotated[int, typer.Option(help="Threads.")] = 4,
    out: Annotated[str | None, typer.Option(help="Also write the bad files to this .jsonl file.")] = None,
) -> None:
    """Read every image: sizes, formats, duplicates, and what cannot be read. Exit code 1 if anything is bad."""
    from tico_ssl.config.sections import DataConfig
    from tico_ssl.data.checking import check as examine
    from tico_ssl.data.sources import open_training
    from tico_ssl.runtime.json_lines import append_json_line
    from tico_ssl.runtime.progress import say

    opened = open_training(DataConfig(source=source), channels)
    report = examine(opened, channels, workers, label="checking")
    for line in report.lines():
        say(line)
    for name, reason in report.bad[: 20 if out is None else None]:
        if out is None:
            say(f"  {name}: {reason}")
        else:
            append_json_line(Path(out), {"file": name, "reason": reason})
    if out is not None:
        say(f"wrote {out}")
    elif len(report.bad) > 20:
        say(f"  ... and {len(report.bad) - 20:,} more: --out bad_files.jsonl writes them all")
    if report.bad:
        raise typer.Exit(1)
    say(f"next       tico pretrain --data {source}")


@data_app.command()
def pack(
    source: SourceArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file to write; it ends in .tico.")],
    size: Annotated[int, typer.Option(help="Pixels of the shorter side.")] = 256,
    jpeg: Annotated[
        bool, typer.Option("--jpeg", help="Keep whole images as JPEG, not squares of bare pixels.")
    ] = False,
    channels: Annotated[int, typer.Option(help="Channels of the images.")] = 3,
    workers: Annotated[int, typer.Option(help="Threads.")] = 4,
) -> None:
    """Pack images into one memory-mapped file that every verb takes as --data. Goes on where it was stopped."""
    from tico_ssl.config.sections import DataConfig
    from tico_ssl.data.names import printable
    from tico_ssl.data.sources import open_training
    from tico_ssl.pipeline.packing import pack as write
    from tico_ssl.runtime.progress import say

    opened = open_training(DataConfig(source=source), channels, shorter=size)
    report = write(opened, Path(out).expanduser(), size, jpeg, workers=workers, label="packing")
    say(f"wrote {out}: {report.images:,} images, {report.bytes / 2**20:,.1f} MiB, {report.seconds:,.0f} s")
    for name, reason in report.bad[:20]:
        say(f"  left out {printable(name)}: {reason}")
    say(f"next       tico pretrain --data {out}")


@data_app.command()
def verify(file: Annotated[str, typer.Argument(metavar="FILE", help="A packed file.")]) -> None:
    """Read a packed file and compare all its checksums. Exit code 2 if anything is damaged."""
    from tico_ssl.data.formats.packed import verify_packed
    from tico_ssl.runtime.progress import say

    images, size = verify_packed(Path(file).expanduser(), label="verifying")
    say(f"{file}: {images:,} images, {size:,} bytes, every checksum is right")


@data_app.command()
def preview(
    source: SourceArgument,
    recipe: Annotated[str, typer.Option(help="Whose views are shown.")] = "demo",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]")] = None,
    out: Annotated[str, typer.Option(help="The picture to write.")] = "preview.png",
    count: Annotated[int, typer.Option(help="Images.", min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Of the views.")] = 0,
) -> None:
    """Draw images and what the networks would see of them, for a person to look at."""
    from tico_ssl.config.recipe import load_recipe
    from tico_ssl.config.views import shorter_side
    from tico_ssl.data.sources import open_training
    from tico_ssl.pipeline.sheet import preview as draw
    from tico_ssl.runtime.progress import say
    from tico_ssl.views.executor import Views

    loaded = load_recipe(recipe, _changes(overrides or []) | {"data.source": source}, say)
    shorter = shorter_side(loaded.views, loaded.data.image_size)
    opened = open_training(loaded.data, loaded.backbone.channels, shorter)
    views = Views(loaded.views, loaded.data.image_size, loaded.data.mean, loaded.data.std)
    bad = draw(opened, views, Path(out).expanduser(), count, seed)
    for name, reason in bad.reasons.items():
        say(f"  left out {name}: {reason}")
    say(f"wrote {out}: originals on top, a row for every view")


def _split(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """The recipe, which has no '=' in it, and the changes."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise UserError(f"one recipe is enough, got {', '.join(names)}; changes are written key=value")
    return (names[0] if names else None), _changes(word for word in words if "=" in word)


def _changes(words: Iterable[str]) -> dict[str, Any]:
    """Settings by key, the later of two for the same key."""
    from tico_ssl.config.recipe import parse_override

    return dict(parse_override(word) for word in words)


def main() -> None:
    """Run a command; what the user can put right is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except BrokenPipeError:  # `tico list | head`
        sys.stderr.close()
    except OSError as error:  # a full disk, a folder that may not be written
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
