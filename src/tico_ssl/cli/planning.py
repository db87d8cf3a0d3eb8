"""The verb that looks ahead: plan."""

from pathlib import Path
from typing import Annotated

import typer

from tico_ssl.cli import _completing as completing
from tico_ssl.cli._app import RECIPE_WORDS, split_words, verb
from tico_ssl.runtime.errors import UserError

MEASURED = ("h200",)  # GPUs that the model knows
IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000}


@verb("tico plan imagenet/tico --gpus 8 --nodes 4")
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=RECIPE_WORDS,
            help="A packaged recipe or YAML file; then overrides.",
            autocompletion=completing.recipe,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs per node.", min=1, max=1024)] = 8,
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of nodes.", min=1, max=1024)] = 1,
    gpu: Annotated[
        str,
        typer.Option(metavar="GPU", help="Kind of GPU: h200, or a file written by `tico bench --out` on another one."),
    ] = "h200",
    images: Annotated[
        int | None,
        typer.Option(metavar="N", help="Training images; by default those of ImageNet, CIFAR or STL-10.", min=1),
    ] = None,
    per_gpu: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Images per step on each GPU, in a batch that grows with their number; by default the recipe's batch "
            "is divided.",
            min=2,
        ),
    ] = None,
    nvlink: Annotated[
        float, typer.Option(metavar="GB/S", help="Bandwidth of a GPU within a node, each way, in GB/s.", min=0.001)
    ] = 450.0,
    network: Annotated[
        float, typer.Option(metavar="GB/S", help="Bandwidth of a GPU between nodes, each way, in GB/s.", min=0.001)
    ] = 50.0,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file for the estimate; by default none.")
    ] = None,
) -> None:
    """Estimate the time and GPU hours of a recipe on 1 to 1,024 GPUs. Takes two training steps on the CPU."""
    from tico_ssl.config.recipe import load_recipe
    from tico_ssl.runtime.files import write_atomically
    from tico_ssl.runtime.progress import say

    name, changes = split_words(words or [])
    name = name or "imagenet/tico"
    recipe = load_recipe(name, changes, say)
    source = recipe.data.source
    known = recipe.data.limit or (IMAGES.get(source) if isinstance(source, str) else None)
    if images is None and known is None:
        raise UserError(f"how many images does {name} train on? Give --images")
    if gpu not in MEASURED and not Path(gpu).expanduser().is_file():
        raise UserError(f"--gpu {gpu}: neither {', '.join(MEASURED)} nor a file; `tico bench --out FILE` writes one")
    if out is not None and not Path(out).expanduser().resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no such folder")

    from tico_ssl.bench.planning import gpu_of, print_plan
    from tico_ssl.bench.planning import plan as model
    from tico_ssl.bench.scaling import Links

    links = Links(per_node=gpus, inside=nvlink * 1e9, between=network * 1e9)
    found = model(recipe, name, gpu_of(gpu), images or known or 0, gpus * nodes, links, per_gpu)
    print_plan(found)
    if out is not None:
        write_atomically(Path(out).expanduser(), found.as_json())
        say(f"wrote {out}")
