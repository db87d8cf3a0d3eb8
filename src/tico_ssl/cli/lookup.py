"""Verbs that look things up in images by their features: embed, search, curate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from tico_ssl.cli._app import DATA_FORMS, BF16Option, DataOption, SplitOption, exit_code, verb
from tico_ssl.runtime.errors import UserError

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A run folder, a backbone file, or a model: torchvision/resnet50."),
]
ImagesArgument = Annotated[list[str], typer.Argument(metavar="DATA", help=f"{DATA_FORMS}.")]
WeightsOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Weights of a model by name (.safetensors, .pth); by default random.")
]


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C loses nothing that is computed already, and this is said."""
    from tico_ssl.runtime.progress import say

    try:
        yield
    except KeyboardInterrupt as stop:
        say("stopped; the same command continues")
        raise typer.Exit(exit_code(stop)) from stop


@verb("tico embed runs/mine --data photos/ --out features.csv")
def embed(
    model: ModelArgument,
    data: DataOption = None,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="File to write: .npz, .npy, .csv, .parquet or .pt.")
    ] = "features.npz",
    normalise: Annotated[bool, typer.Option("--normalise", help="Divide features by their length (L2).")] = False,
    weights: WeightsOption = None,
    split: SplitOption = "all",
    bf16: BF16Option = False,
) -> None:
    """Extract the features of images. They are written with paths, splits and labels; the same command resumes."""
    from tico_ssl.features.embedding import embed as write
    from tico_ssl.runtime.progress import say

    with resumable():
        written = write(model, data, out, bf16, normalise=normalise, weights=weights, split=split)
    say(f"wrote {written}")


@verb("tico search runs/mine photos/ --query one.jpg --out found")
def search(
    model: ModelArgument,
    data: ImagesArgument,
    query: Annotated[
        list[str] | None, typer.Option(metavar="IMAGE", help="Image to search for; at least one is needed. Repeatable.")
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", help="Number of images to find for each query.")] = 12,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Folder for a page, a contact sheet and a table; by default the terminal only."
        ),
    ] = None,
    weights: WeightsOption = None,
    split: SplitOption = "all",
    bf16: BF16Option = False,
) -> None:
    """Find the images nearest to others by cosine similarity. Features are kept, so a second search is fast."""
    from tico_ssl.looking_up.searching import search as find
    from tico_ssl.looking_up.searching import show
    from tico_ssl.runtime.progress import say

    if not query:
        raise UserError("which image? Give it with --query, once or several times")
    with resumable():
        found = find(model, data, query, top, out, weights=weights, split=split, bf16=bf16)
    show(found)
    if out is not None:
        say(f"\nwrote      {out}/search.html, search.png, search.csv")


@verb("tico curate runs/mine photos/ --out curated --subset 1000")
def curate(
    model: ModelArgument,
    data: ImagesArgument,
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for the page, its figure and the tables.")
    ] = "curated",
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="COSINE",
            help="Cosine similarity (-1 to 1) above which images are near-duplicates; by default chosen from the data.",
        ),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(metavar="N", help="Number of neighbours whose mean distance is the outlier score.")
    ] = 10,
    subset: Annotated[
        int | None, typer.Option(metavar="N", help="Also choose N images that cover the whole set; by default none.")
    ] = None,
    weights: WeightsOption = None,
    split: SplitOption = "all",
    bf16: BF16Option = False,
) -> None:
    """Find near-duplicates and outliers, and choose a diverse subset. Nothing is deleted or moved."""
    from tico_ssl.looking_up.curating import curate as find
    from tico_ssl.runtime.progress import say

    with resumable():
        found = find(
            model,
            data,
            out,
            threshold=threshold,
            neighbours=neighbours,
            subset=subset,
            weights=weights,
            split=split,
            bf16=bf16,
        )
    for line in found.lines():
        say(line)
    tables = "duplicates.csv, outliers.csv" + ("" if subset is None else ", subset.csv")
    say(f"\nwrote      {out}/curate.html, {tables}, figures/")
