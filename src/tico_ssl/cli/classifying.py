"""Verbs of classifiers: finetune, predict."""

from typing import Annotated

import typer

from tico_ssl.cli._app import DataOption, changes_of, command, exit_code, verb


@verb("tico finetune runs/mine --data labelled/ head=whole epochs=30")
def finetune(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run folder, a backbone file, or a model, untrained: torchvision/resnet18."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE ...]",
            help="Settings: head=linear (default; fitted to frozen features) or head=whole (trains the whole network), "
            "epochs=30, lr_backbone=0.01, lr_head=0.1, held_out=0.1, seed=0, ...",
        ),
    ] = None,
    data: DataOption = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Folder to write; by default classifier/ in the run folder or beside the file."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the classifier if there is one.")] = False,
) -> None:
    """Train a classifier on a backbone with labelled images. Writes the model, its accuracy and an HTML page."""
    from tico_ssl.classifying.finetune import finetune as make
    from tico_ssl.runtime.progress import is_main, say

    try:
        made = make(run, data, out, changes_of(words or []), overwrite)
    except KeyboardInterrupt as stop:
        say(str(stop) or "stopped; the same command continues")
        raise typer.Exit(exit_code(stop)) from stop
    if not is_main():
        return
    say(f"\nwrote      {made.folder}/classifier.safetensors, results.json, report.html")
    say(f"use it     {command('predict', made.folder, 'IMAGES', '--out', 'predictions.csv')}")
    say(made.summary)


@verb("tico predict runs/mine photos/ --out predictions.csv")
def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or file of `tico finetune`, or its run folder.")
    ],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES...", help="Folders, image files, patterns ('photos/*.jpg'), or as for --data."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File to write: .csv, .jsonl or .parquet; by default a short table is printed."
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Number of classes per image, the likeliest first.", min=1)] = 5,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists, and start over.")
    ] = False,
) -> None:
    """Predict the classes of images. After an interruption, the same command continues."""
    from tico_ssl.classifying.predict import predict as work
    from tico_ssl.classifying.summary import print_predictions
    from tico_ssl.runtime.progress import say

    try:
        found = work(model, images, out, top, overwrite)
    except KeyboardInterrupt as stop:
        say("stopped" if out is None else "stopped; the same command continues")
        raise typer.Exit(exit_code(stop)) from stop
    print_predictions(found, out)
