"""Verbs that compute: pretrain, replay, evaluate, study, bench."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tico_ssl.cli import _completing as completing
from tico_ssl.cli._app import (
    DATA_FORMS,
    RECIPE_WORDS,
    BF16Option,
    DataOption,
    SlurmOption,
    changes_of,
    command,
    data_words,
    exit_code,
    split_words,
    verb,
)
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted


@verb("tico pretrain photos --data photos/ --out runs/mine training.epochs=100")
def pretrain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=RECIPE_WORDS,
            help="A packaged recipe or YAML file, by default demo; then overrides.",
            autocompletion=completing.recipe,
        ),
    ] = None,
    data: DataOption = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Run folder; by default runs/ and the recipe's name.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run if it exists, else start it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run if it exists.")] = False,
    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="Find the largest batch that fits on the GPU, and train nothing.")
    ] = False,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="Weights to start from: torchvision/NAME or timm/NAME (public weights), a checkpoint file of another "
            "program, a run or a backbone file. As training.init=...; by default random.",
        ),
    ] = None,
    init_strict: Annotated[
        str | None,
        typer.Option(
            metavar="true|false",
            help="true (default): --init must have weights for the whole backbone; false: what is missing starts at "
            "random.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(metavar="N", help="As training.epochs=...; by default the recipe's.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Images per step, as training.batch_size=...; by default the recipe's."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(metavar="N", help="Side in pixels, as data.image_size=...; by default the recipe's.")
    ] = None,
    slurm: SlurmOption = None,
) -> None:
    """Pretrain a backbone. Without arguments: recipe `demo` on synthetic textures, minutes on a CPU."""
    from tico_ssl.runtime.progress import is_main, say
    from tico_ssl.training.start import find_batch as find
    from tico_ssl.training.start import pretrain as train

    recipe, changes = split_words(words or [])
    plain: dict[str, Any] = {"training.epochs": epochs, "training.batch_size": batch_size}
    plain |= {"data.image_size": image_size, "training.init": init}
    if init_strict is not None:
        plain |= changes_of([f"training.init_strict={init_strict}"])
    for key, value in plain.items():
        if value is not None and changes.setdefault(key, value) != value:
            raise UserError(f"{key} is given twice: {changes[key]} and {value}")
    if find_batch:
        for line in find(recipe or "demo", data, changes):
            say(line)
        return
    if slurm is not None:
        from tico_ssl.training.slurm import submit_pretraining

        for line in submit_pretraining(slurm, recipe or "demo", data, out, changes, resume, overwrite):
            say(line)
        return
    try:
        run = train(recipe or "demo", data, out, changes, resume, overwrite)
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; --resume continues from the last checkpoint")
        raise typer.Exit(exit_code(stop)) from stop
    if not is_main():
        return
    logged = any(run.folder.glob("events.out.tfevents.*"))
    board = f", tensorboard --logdir {shlex.quote(str(run.folder))}" if logged else ""
    say(f"\nlook at    {run.folder}/views.png, {run.folder}/metrics.jsonl{board}")
    say(f"backbone   {run.backbone_file}")
    labelled = any("knn" in key for line in run.metrics() for key in line)
    protocols = ["knn", "linear", "rankme"] if labelled else ["rankme"]
    say(f"next       {command('evaluate', run.folder, *protocols)}")


@verb("tico replay runs/mine")
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder whose training stopped at NaN.")],
) -> None:
    """Repeat the step at which a training became NaN. Shows the first bad value, its likely cause and what to try."""
    from tico_ssl.runtime.progress import say
    from tico_ssl.training.start import replay as explain

    for line in explain(run):
        say(line)


@verb("tico evaluate runs/mine knn linear --data labelled/")
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
            autocompletion=completing.protocol,
        ),
    ] = None,
    data: DataOption = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Weights of a model by name (.safetensors, .pth); by default random."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look: only protocols on features, with at most 2,000 training and 1,000 test images.",
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="With `all`: also repeat protocols that have a result already.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute everything, and cache nothing.")] = False,
    bf16: BF16Option = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Compare with a run, a backbone file, a model by name (random), or NAME=WEIGHTS; by default none. "
            "Repeatable.",
        ),
    ] = None,
) -> None:
    """Evaluate a backbone beside an untrained one. `all` runs every protocol that the data allow, cheap ones first."""
    from tico_ssl.config.recipe import is_override
    from tico_ssl.evaluations._evaluate import ALL, evaluate_all, imported
    from tico_ssl.evaluations._single import NotSaved
    from tico_ssl.features.homes import home_of, is_model_name
    from tico_ssl.results.run_folder import Run
    from tico_ssl.results.table import print_results
    from tico_ssl.runtime.progress import is_main, say

    protocols = [word for word in words or [] if not is_override(word)] or ([ALL] if quick else [])
    if not protocols:
        raise typer.BadParameter("which protocol? See `tico list evaluations`")
    overrides = changes_of(word for word in words or [] if is_override(word))
    try:
        subject = run if weights is None else str(imported(run, weights, data))
        cache, anew = not no_cache, again or no_cache
        beside = against or []
        results = evaluate_all(subject, protocols, data, overrides, cache, bf16, anew, quick, beside)
        unsaved = None
    except NotSaved as error:
        results, unsaved = error.results, error
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; the same command continues")
        raise typer.Exit(exit_code(stop)) from stop
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
        changes = [word for word in words or [] if is_override(word)]
        others = [word for other in beside for word in ("--against", other)]
        options = [*data_words(data), *others, *(["--bf16"] if bf16 else [])]
        say(f"next       {command('evaluate', subject, ALL, *changes, *options)}")
    elif Path(subject).expanduser().is_dir():
        say(f"next       {command('report', subject, *data_words(data))}")


@verb("tico study methods-textures --dry-run")
def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY [KEY=VALUE ...]",
            help="`tico list studies`, or a YAML file; then overrides.",
            autocompletion=completing.study,
        ),
    ],
    data: DataOption = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of the study; by default runs/study-STUDY.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Run only this one; by default all. Repeatable.")
    ] = None,
    side_by_side: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Parallel runs; by default 3 per GPU, or 1 per 4 CPU threads."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and their progress, and stop.")] = False,
    slurm: SlurmOption = None,
) -> None:
    """Pretrain and evaluate many runs, and compare them in one table. The same command resumes."""
    from tico_ssl.config.study import jobs
    from tico_ssl.runtime.progress import say
    from tico_ssl.studies import Workshop, table
    from tico_ssl.studies import study as make

    name, changes = split_words(words)
    if name is None:
        raise UserError("which study? See `tico list studies`")
    if dry_run:
        workshop = Workshop.open(name, data, out, changes)
        workshop.show_plan(jobs(workshop.study, only))
        return
    if slurm is not None:
        from tico_ssl.studies.slurm import submit_study

        for line in submit_study(slurm, name, data, out, changes, only or (), side_by_side):
            say(line)
        return
    try:
        summary = make(name, data, out, changes, only or (), side_by_side)
    except KeyboardInterrupt as stop:
        say("stopped; the same command continues")
        raise typer.Exit(exit_code(stop)) from stop
    table.show(summary)
    say(f"\nwrote      {summary.folder}/results.md, results.csv, results.json")
    if summary.failures:
        say(f"{counted(len(summary.failures), 'run')} failed, see {summary.folder}/logs; the same command retries them")
        raise typer.Exit(1)
    say(f"next       {command('evaluate', summary.folder / 'RUN', 'PROTOCOL')}")


@verb("tico bench photos --data photos/ --out speed.json")
def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=RECIPE_WORDS,
            help="A packaged recipe or YAML file, by default demo, or cifar10/tico on a GPU; then overrides.",
            autocompletion=completing.recipe,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="IMAGES", help=f"{DATA_FORMS}; by default random images. Repeatable."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="LIBRARY", help="Another library to time on the same work: lightly; by default none."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Approximate seconds per measurement.", min=0)
    ] = 2.0,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also time steps with torch.compile (takes minutes).")
    ] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file for the measurements; by default none.")
    ] = None,
    methods: Annotated[
        bool, typer.Option("--methods", help="Also time a step of every method with this network and batch size.")
    ] = False,
) -> None:
    """Measure training throughput. Also shows its upper bound (roofline) and the time of each stage."""
    from tico_ssl.bench import bench as measure
    from tico_ssl.bench.table import print_report

    recipe, changes = split_words(words or [])
    print_report(measure(recipe, data, changes, against, seconds, compiled, out, methods))
