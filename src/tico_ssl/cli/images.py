"""Verbs of images: data check, pack, verify, preview."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tico_ssl.cli import _completing as completing
from tico_ssl.cli._app import SourceArgument, SplitOption, app, changes_of, command, verb
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    from tico_ssl.data.checking import CheckReport
    from tico_ssl.data.splits import Part

FEWEST = 2  # images in a batch: BatchNorm needs a variance

data_app = typer.Typer(
    help="Preview, check and pack images; verify a packed file.",
    no_args_is_help=True,
    epilog="\b\nExample:\n  tico data check photos/",
)
app.add_typer(data_app, name="data")


@verb("tico data check photos/ --out bad_files.jsonl", of=data_app)
def check(
    source: SourceArgument,
    channels: Annotated[int, typer.Option(metavar="N", help="Channels of the network's input.")] = 3,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of threads.", min=1, max=256)] = 4,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON lines file for all bad files; by default 20 are printed.")
    ] = None,
    split: SplitOption = "all",
) -> None:
    """Read every image: splits, classes, sizes, formats, duplicates, bad files. Exit code 1 if a file is bad."""
    parts = _opened(source, split, channels)

    from tico_ssl.data.checking import check as examine
    from tico_ssl.data.checking import contents, shared
    from tico_ssl.data.splits import together
    from tico_ssl.runtime.json_lines import write_json_lines
    from tico_ssl.runtime.progress import say

    report = examine(together(parts), workers, label="checking")
    for line in (*report.lines(), *shared(parts, report.duplicates), *contents(parts)):
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
    if parts[0].split == "train":
        say(f"next       {_training(source, len(parts[0].source), report, channels)}")
    if report.bad:
        raise typer.Exit(1)


def _training(source: str, images: int, report: "CheckReport", channels: int) -> str:
    """The command that trains on the training images, which are the first `images` of the report; bad ones are left
    out, however many there are."""
    from tico_ssl.config.sections import DataConfig
    from tico_ssl.data.bad_files import SAMPLE
    from tico_ssl.data.checking import recommended
    from tico_ssl.data.source import spread_evenly

    bad = {place for place in report.bad_places if place < images}
    if (good := images - len(bad)) < FEWEST:
        return f"add images: a batch needs at least {FEWEST}, and {good} can be read"
    recipe, *overrides = recommended(good, report.side, channels)
    tried = spread_evenly(images, SAMPLE).tolist()  # by a run, before it starts
    if (share := len(bad.intersection(tried)) / len(tried)) > DataConfig().most_bad:
        overrides.append(f"data.most_bad={math.ceil(100 * share) / 100}")
    return command("pretrain", recipe, "--data", source, *overrides)


@verb("tico data pack photos/ photos.tico --size 256", of=data_app)
def pack(
    source: SourceArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write, ending in .tico.")],
    size: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            help="Shorter side of the stored images, in pixels; by default 256, or the size of smaller images.",
        ),
    ] = None,
    jpeg: Annotated[
        bool, typer.Option("--jpeg", help="Store whole images as JPEG instead of raw central squares.")
    ] = False,
    channels: Annotated[int, typer.Option(metavar="N", help="Number of image channels.")] = 3,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of threads.", min=1, max=256)] = 4,
    split: SplitOption = "all",
) -> None:
    """Pack images into one memory-mapped file for --data, with their splits. Resumes after an interruption."""
    from tico_ssl.config.views import USUAL_SIDE

    parts = _opened(source, split, channels, USUAL_SIDE if size is None else size)

    from tico_ssl.config.recipe import load_recipe
    from tico_ssl.data.checking import contents, recommended
    from tico_ssl.pipeline.packing import largest_side, pack_splits
    from tico_ssl.runtime.progress import say
    from tico_ssl.views.centre import smaller_than_needed

    largest = max(largest_side(part.source) for part in parts)
    if size is None:
        size = min(USUAL_SIDE, largest or USUAL_SIDE)
    report = pack_splits(parts, Path(out).expanduser(), size, jpeg, workers=workers, label="packing")
    for line in contents(parts):
        say(line)
    say(f"wrote {out}: {counted(report.images, 'image')}, {report.bytes / 2**20:,.1f} MiB, {report.seconds:,.0f} s")
    for name, reason in report.bad[:20]:
        say(f"  left out {printable(name)}: {reason}")
    enough = report.sides.original
    recipe, *overrides = recommended(len(parts[0].source), min(size, enough or size), channels)
    side = load_recipe(recipe, changes_of(overrides)).data.image_size
    if (smaller := smaller_than_needed(report.sides, side)) is not None:
        say(f"warning: {out} is {smaller}")
    elif not jpeg and 0 < largest < size:
        say(f"warning: images of {largest} pixels were enlarged: --size {largest} keeps their pixels, in less space")
    say(f"next       {command('pretrain', recipe, '--data', out, *overrides)}")


def _opened(source: str, split: str, channels: int, shorter: int | None = None) -> "tuple[Part, ...]":
    """The images of all splits or of one; a split that cannot be is an error before torch is imported."""
    from tico_ssl.data.given import require_data, require_split

    require_split(split)
    require_data(source)

    from tico_ssl.config.sections import DataConfig
    from tico_ssl.data.sources import open_source
    from tico_ssl.data.splits import open_splits

    config = DataConfig(source=source)
    return open_splits(config, lambda name: open_source(config, name, channels, shorter), split)


@verb("tico data verify photos.tico", of=data_app)
def verify(file: Annotated[str, typer.Argument(metavar="FILE", help="A packed file.")]) -> None:
    """Verify all checksums of a packed file. Exit code 2 if it is damaged."""
    from tico_ssl.data.formats.packed import verify_packed
    from tico_ssl.runtime.progress import say

    images, size = verify_packed(Path(file).expanduser(), label="verifying")
    say(f"{file}: {counted(images, 'image')}, {size:,} bytes, all checksums are correct")


@verb("tico data preview photos/ --recipe photos --count 6", of=data_app)
def preview(
    source: SourceArgument,
    recipe: Annotated[
        str, typer.Option(metavar="RECIPE", help="Recipe whose views are drawn.", autocompletion=completing.recipe)
    ] = "demo",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Overrides.")] = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="PNG file to write.")] = "preview.png",
    count: Annotated[int, typer.Option(metavar="N", help="Number of images.", min=1)] = 12,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the views.")] = 0,
) -> None:
    """Draw images and their augmented views on a contact sheet."""
    from tico_ssl.config.recipe import load_recipe
    from tico_ssl.config.views import shorter_side
    from tico_ssl.data.measuring import settled
    from tico_ssl.data.sources import open_training
    from tico_ssl.pipeline.sheet import preview as draw
    from tico_ssl.runtime.progress import say
    from tico_ssl.views.executor import Views

    loaded = load_recipe(recipe, changes_of(overrides or []) | {"data.source": source}, say)
    shorter = shorter_side(loaded.views, loaded.data.image_size)
    opened = open_training(loaded.data, loaded.backbone.channels, shorter)
    data = settled(loaded.data, opened, loaded.backbone.channels)
    views = Views(loaded.views, data.image_size, data.mean, data.std)
    bad = draw(opened, views, Path(out).expanduser(), count, seed)
    for name, reason in bad.reasons.items():
        say(f"  left out {name}: {reason}")
    say(f"wrote {out}: originals in the top row, then a row per view")
