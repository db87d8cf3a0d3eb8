"""The command line: each verb a thin call of a public function."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from tico_ssl.runtime.errors import UserError, one_line
from tico_ssl.runtime.printing import printable, printable_lines

app = typer.Typer(
    help="Self-supervised pretraining of vision backbones with TiCo, from a folder of images to an evaluated model.",
    no_args_is_help=True,
    add_completion=False,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


data_app = typer.Typer(help="Preview, check and pack images; verify a packed file.", no_args_is_help=True)
app.add_typer(data_app, name="data")

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a backbone .safetensors file.")]
DATA_FORMS = "A folder, packed file, tar shards, parquet or a name (`tico list data`)"
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help=f"{DATA_FORMS}; by default the data of the recipe or run. Repeatable.",
    ),
]
BF16Option = Annotated[bool, typer.Option("--bf16", help="Compute frozen features in bf16: faster, less exact.")]
RECIPE_WORDS = "[RECIPE] [KEY=VALUE ...]"
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="Images, as for --data.")]


@app.command()
def pretrain(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar=RECIPE_WORDS, help="A packaged recipe or YAML file, by default demo; then overrides."),
    ] = None,
    data: DataOption = None,
    out: Annotated[str | None, typer.Option(help="Run folder; by default runs/ and the recipe's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run if it exists, else start it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run if it exists.")] = False,
    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="Find the largest batch that fits on the GPU, and train nothing.")
    ] = False,
    epochs: Annotated[int | None, typer.Option(help="As training.epochs=...")] = None,
    batch_size: Annotated[int | None, typer.Option(help="As training.batch_size=...")] = None,
    image_size: Annotated[int | None, typer.Option(help="As data.image_size=..., in pixels.")] = None,
) -> None:
    """Pretrain a backbone. Without arguments: recipe `demo` on synthetic textures, minutes on a CPU."""
    from tico_ssl.runtime.progress import is_main, say
    from tico_ssl.training.start import find_batch as find
    from tico_ssl.training.start import pretrain as train

    recipe, changes = _split(words or [])
    plain = {"training.epochs": epochs, "training.batch_size": batch_size, "data.image_size": image_size}
    for key, value in plain.items():
        if value is not None and changes.setdefault(key, value) != value:
            raise UserError(f"{key} is given twice: {changes[key]} and {value}")
    if find_batch:
        for line in find(recipe or "demo", data, changes):
            say(line)
        return
    try:
        run = train(recipe or "demo", data, out, changes, resume, overwrite)
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; --resume continues from the last checkpoint")
        raise typer.Exit(_exit_code(stop)) from stop
    if not is_main():
        return
    say(f"\nlook at    {run.folder}/views.png, {run.folder}/metrics.jsonl, tensorboard --logdir {run.folder}")
    say(f"backbone   {run.backbone_file}")
    labelled = any("knn" in key for line in run.metrics() for key in line)
    say(f"next       tico evaluate {run.folder} {'knn linear rankme' if labelled else 'rankme'}")


@app.command()
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder whose training stopped at NaN.")],
) -> None:
    """Carry out again the step at which a training became NaN. Says where it began, why, and what to try."""
    from tico_ssl.runtime.progress import say
    from tico_ssl.training.start import replay as explain

    for line in explain(run):
        say(line)


@app.command()
def evaluate(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run folder, a backbone file, or a model: torchvision/resnet50."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROTOCOL... [KEY=VALUE ...]",
            help="`tico list evaluations`, or all; then overrides of settings.",
        ),
    ] = None,
    data: DataOption = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of a model by name (.safetensors, .pth); by default random."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: protocols that need features only, on some of the images.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="With `all`: also protocols that already have this result.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute everything again, and cache nothing.")] = False,
    bf16: BF16Option = False,
) -> None:
    """Evaluate a backbone beside an untrained one. `all`: by every protocol that the data allow, cheap ones first."""
    from tico_ssl.evaluations._evaluate import ALL, evaluate_all, imported
    from tico_ssl.evaluations._single import NotSaved
    from tico_ssl.features.homes import home_of, is_model_name
    from tico_ssl.results.run_folder import Run
    from tico_ssl.results.table import print_results
    from tico_ssl.runtime.progress import is_main, say

    protocols = [word for word in words or [] if "=" not in word] or ([ALL] if quick else [])
    if not protocols:
        raise typer.BadParameter("which protocol? See `tico list evaluations`")
    overrides = _changes(word for word in words or [] if "=" in word)
    try:
        subject = run if weights is None else str(imported(run, weights, data))
        cache, anew = not no_cache, again or no_cache
        results, unsaved = evaluate_all(subject, protocols, data, overrides, cache, bf16, anew, quick), None
    except NotSaved as error:
        results, unsaved = error.results, error
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; the same command continues")
        raise typer.Exit(_exit_code(stop)) from stop
    if not is_main():
        return
    print_results(results)
    if unsaved is not None:
        raise unsaved
    home = Run(home_of(subject))
    say(f"\nresults    {home.quick_results_file if quick else home.results_file}")
    if not is_model_name(subject):
        say(f"use it     from tico_ssl import load_backbone; backbone = load_backbone({subject!r})")
    if quick:
        say(f"next       tico evaluate {subject} all{''.join(f' --data {place}' for place in data or [])}")
    elif Path(subject).expanduser().is_dir():
        say(f"next       tico report {subject}")


@app.command()
def embed(
    run: RunArgument,
    data: DataOption = None,
    out: Annotated[str, typer.Option(help="File to write: .npz, .csv or .parquet.")] = "features.npz",
    bf16: BF16Option = False,
) -> None:
    """Extract the features of images. They are written with file names and labels."""
    from tico_ssl.features.embedding import embed as write
    from tico_ssl.runtime.progress import say

    say(f"wrote {write(run, data, out, bf16)}")


@app.command()
def export(
    run: RunArgument,
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="torchvision or timm (`tico list exporting`).")],
    out: Annotated[str, typer.Option(help="File to write.")] = "backbone.pth",
) -> None:
    """Export the backbone to another library."""
    from tico_ssl.exporting._writing import export_with_snippet
    from tico_ssl.runtime.progress import say

    snippet = export_with_snippet(run, format, out)
    say(f"wrote {out}; to load it:\n\n{snippet}")


@app.command()
def study(
    words: Annotated[
        list[str],
        typer.Argument(metavar="STUDY [KEY=VALUE ...]", help="`tico list studies`, or a YAML file; then overrides."),
    ],
    data: DataOption = None,
    out: Annotated[str | None, typer.Option(help="Folder of the study; by default runs/study-STUDY.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run to carry out, repeatable; by default all.")] = None,
    side_by_side: Annotated[
        int | None, typer.Option(min=1, help="Parallel runs; by default 3 per GPU, or 1 per 4 CPU threads.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and their progress, and stop.")] = False,
) -> None:
    """Pretrain and evaluate many runs, and compare them in one table. The same command resumes."""
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
        say("stopped; the same command continues")
        raise typer.Exit(_exit_code(stop)) from stop
    table.show(summary)
    say(f"\nwrote      {summary.folder}/results.md, results.csv, results.json")
    if summary.failures:
        say(f"{len(summary.failures)} run(s) failed, see {summary.folder}/logs; the same command retries them")
        raise typer.Exit(1)
    say(f"next       tico evaluate {summary.folder}/RUN PROTOCOL")


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="One or several run folders, or the folder of a study.")
    ],
    data: DataOption = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder to write to; by default the run's, `report` for several."),
    ] = None,
    points: Annotated[int, typer.Option(min=0, help="Images on the map of a run; 0: no map and no gallery.")] = 10_000,
) -> None:
    """Write an HTML report. It is one file that needs no network; its figures are also SVG and PNG."""
    from tico_ssl.report import report as write
    from tico_ssl.runtime.progress import say

    path = write(runs, out, data, points)
    say(f"wrote      {path} ({path.stat().st_size / 2**20:.1f} MiB), {path.parent / 'figures'}")
    say("next       open it in a browser; it needs no network")


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders or study folders.")],
    format: Annotated[str | None, typer.Option(help="markdown, csv or latex; by default a terminal table.")] = None,
    out: Annotated[str | None, typer.Option(help="File to write: .md, .csv or .tex; by default the terminal.")] = None,
) -> None:
    """Compare runs in one table. A row per recipe, with mean and standard deviation over seeds."""
    from tico_ssl.results.comparison import compare as measure
    from tico_ssl.results.comparison import show
    from tico_ssl.runtime.progress import say

    comparison, text = measure(runs, format, out)
    if out is not None:
        say(f"wrote      {out}")
    elif format is not None:
        typer.echo(printable_lines(text), nl=False)
    else:
        show(comparison)


@app.command()
def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=RECIPE_WORDS,
            help="A packaged recipe or YAML file, by default demo, or cifar10/tico on a GPU; then overrides.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help=f"{DATA_FORMS}; by default random images. Repeatable.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another library to time on the same work: lightly; by default none."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Approximate seconds per measurement.", min=0)] = 2.0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also time steps with torch.compile (takes minutes).")
    ] = False,
    out: Annotated[str | None, typer.Option(help="JSON file for the measurements; by default none.")] = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Also time a step of every method at this network and batch size.")
    ] = False,
) -> None:
    """Measure training throughput. Also its upper bound (roofline) and the time of each stage."""
    from tico_ssl.bench import bench as measure
    from tico_ssl.bench.table import print_report

    recipe, changes = _split(words or [])
    print_report(measure(recipe, data, changes, against, seconds, compiled, out, methods))


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="recipes, studies, methods, views, data, backbones, evaluations, exporting."
        ),
    ] = "all",
    search: Annotated[str, typer.Argument(metavar="TEXT", help="Only names that contain this; by default all.")] = "",
) -> None:
    """List recipes, methods, backbones, data, evaluations and more."""
    from tico_ssl.listing import print_catalogue

    print_catalogue(what, search)


@app.command()
def describe(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe or study, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Overrides.")] = None,
) -> None:
    """Print a recipe or a study, every field with its meaning. The output is itself a recipe."""
    from tico_ssl.listing import describe as in_words

    typer.echo(printable_lines(in_words(recipe, _changes(overrides or []))))


@app.command()
def cache(
    which: Annotated[str, typer.Argument(metavar="[TEXT]", help="Only entries with this text, such as a path.")] = "",
    limit: Annotated[str | None, typer.Option(help="Set the size limit, such as 20G; what is over it goes.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove entries that no command uses now.")] = False,
) -> None:
    """Show, limit or clear the decoded images that are kept between commands."""
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


@data_app.command()
def check(
    source: SourceArgument,
    channels: Annotated[int, typer.Option(help="Channels of the network's input.")] = 3,
    workers: Annotated[int, typer.Option(help="Number of threads.", min=1, max=256)] = 4,
    out: Annotated[
        str | None, typer.Option(help="JSON lines file for all bad files; by default 20 are printed.")
    ] = None,
) -> None:
    """Read every image: sizes, formats, duplicates and unreadable files. Exit code 1 if a file is bad."""
    from tico_ssl.config.sections import DataConfig
    from tico_ssl.data.checking import check as examine
    from tico_ssl.data.sources import open_training
    from tico_ssl.runtime.json_lines import write_json_lines
    from tico_ssl.runtime.progress import say

    opened = open_training(DataConfig(source=source), channels)
    report = examine(opened, channels, workers, label="checking")
    for line in report.lines():
        say(line)
    if out is not None:
        path = Path(out).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(path, ({"file": name, "reason": reason} for name, reason in report.bad))
        say(f"wrote {out}")
    for name, reason in report.bad[:20] if out is None else []:
        say(f"  {name}: {reason}")
    if out is None and len(report.bad) > 20:
        say(f"  ... and {len(report.bad) - 20:,} more: --out bad_files.jsonl writes them all")
    if report.bad:
        raise typer.Exit(1)
    say(f"next       tico pretrain --data {source}")


@data_app.command()
def pack(
    source: SourceArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write, *.tico.")],
    size: Annotated[int, typer.Option(help="Shorter side in pixels.")] = 256,
    jpeg: Annotated[
        bool, typer.Option("--jpeg", help="Store whole images as JPEG instead of raw central squares.")
    ] = False,
    channels: Annotated[int, typer.Option(help="Number of image channels.")] = 3,
    workers: Annotated[int, typer.Option(help="Number of threads.", min=1, max=256)] = 4,
) -> None:
    """Pack images into one memory-mapped file for --data. Resumes after an interruption."""
    from tico_ssl.config.sections import DataConfig
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
    """Verify all checksums of a packed file. Exit code 2 if it is damaged."""
    from tico_ssl.data.formats.packed import verify_packed
    from tico_ssl.runtime.progress import say

    images, size = verify_packed(Path(file).expanduser(), label="verifying")
    say(f"{file}: {images:,} images, {size:,} bytes, all checksums are correct")


@data_app.command()
def preview(
    source: SourceArgument,
    recipe: Annotated[str, typer.Option(help="Recipe whose views are drawn.")] = "demo",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Overrides.")] = None,
    out: Annotated[str, typer.Option(help="PNG file to write.")] = "preview.png",
    count: Annotated[int, typer.Option(help="Number of images.", min=1)] = 12,
    seed: Annotated[int, typer.Option(help="Random seed of the views.")] = 0,
) -> None:
    """Draw images and their augmented views on a contact sheet."""
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
    say(f"wrote {out}: originals in the top row, then a row per view")


def _exit_code(stop: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM."""
    return int(getattr(stop, "exit_code", 130))


def _split(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """The recipe, which has no '=' in it, and the overrides."""
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise UserError(f"expected one recipe, got {', '.join(names)}; overrides are written key=value")
    return (names[0] if names else None), _changes(word for word in words if "=" in word)


def _changes(words: Iterable[str]) -> dict[str, Any]:
    """Overrides by key; the last one for a key counts."""
    from tico_ssl.config.recipe import parse_override

    return dict(parse_override(word) for word in words)


def main() -> None:
    """Run a command; what a user can put right is one line on stderr and exit code 2, or 3 for a training that became
    NaN."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `tico list | head`
        _silence()
        sys.exit(1)
    except Exception as error:
        if (line := one_line(error)) is None:
            raise
        sys.stderr.write(f"error: {line}\n")
        _silence()
        sys.exit(getattr(error, "exit_code", UserError.exit_code))


def _silence() -> None:
    """What could not be printed is not tried again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
