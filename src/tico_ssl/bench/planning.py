"""`tico plan`: what a recipe takes on many GPUs, as a report and as tables in the terminal."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from tico_ssl.bench.ceilings import Ceilings
from tico_ssl.bench.scaling import GPUS, Gpu, Links, Purpose, Row, purposes, rows, work_of
from tico_ssl.config.recipe import Recipe
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import console, say
from tico_ssl.runtime.wording import counted

MOST = 1024  # GPUs in the table, unless more are asked for


@dataclass(frozen=True)
class Plan:
    """The model's answer for a recipe."""

    recipe: str
    network: str
    gpu: str
    images: int
    epochs: int
    asked: int
    """Number of GPUs that were asked for."""
    links: Links
    rows: list[Row]
    sent: list[Purpose]
    """By every process in a step, on so many GPUs."""

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


def plan(
    recipe: Recipe, name: str, gpu: Gpu, images: int, asked: int, links: Links, per_gpu: int | None = None
) -> Plan:
    """Training by a recipe on 1 to 1,024 GPUs and on as many as are asked for. With `per_gpu` images on each, the batch
    grows with them; else it is the recipe's."""
    work = work_of(recipe, gpu)
    worlds = sorted({asked, *(2**power for power in range(MOST.bit_length()))})
    found = rows(work, recipe, images, worlds, gpu, links, per_gpu)
    wanted = next((row for row in found if row.gpus == asked), None)
    if wanted is None:
        batch = recipe.training.batch_size
        raise UserError(
            f"{counted(batch, 'image')} cannot be divided among {counted(asked, 'GPU')} with at least two each: "
            "change training.batch_size or give --per-gpu"
        )
    return Plan(
        recipe=name,
        network=recipe.backbone.name,
        gpu=gpu.name,
        images=images,
        epochs=recipe.training.epochs,
        asked=asked,
        links=links,
        rows=found,
        sent=purposes(work, asked, wanted.images_per_gpu, links),
    )


def gpu_of(name: str) -> Gpu:
    """A GPU by name, or by the file of a `tico bench --out` on it. Such a file knows one batch, so the model then takes
    a time that is proportional to the number of images."""
    if name in GPUS:
        return GPUS[name]
    try:
        report: Mapping[str, Any] = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
        fastest = min(speed["step_seconds"] for speed in report["speeds"])
        share = report["batch"] / fastest / report["roofline"]["images_per_second"]
        return Gpu(report["device"], Ceilings(**report["ceilings"]), share, 0.0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--gpu {name}: not a file that `tico bench --out` has written ({error!r})") from error


def print_plan(plan: Plan) -> None:
    """Print the table of GPUs, and what a step sends."""
    links = plan.links
    say(f"recipe     {plan.recipe}: {plan.network}, {counted(plan.epochs, 'epoch')} of {counted(plan.images, 'image')}")
    say(f"GPU        {plan.gpu}, {links.per_node} in a node; computation fitted to measured steps, captured, in bf16")
    inside, between = links.inside / 1e9, links.between / 1e9
    say(f"links      {inside:,.0f} GB/s inside a node, {between:,.0f} GB/s per GPU between nodes: stated, not measured")
    console.print(_gpus(plan))
    console.print(_sent(plan))
    say("A model: see docs/scaling.md for what it leaves out, such as decoding and whether a batch fits the memory.")


def _table(title: str, first: str, columns: tuple[str, ...]) -> Table:
    table = Table(first, title=title, title_justify="left", title_style="", box=SIMPLE)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _gpus(plan: Plan) -> Table:
    columns = ("each", "batch", "ms", "sending", "images/s", "efficiency", "hours", "GPU hours")
    table = _table("the model", "GPUs", columns)
    for row in plan.rows:
        step = row.computing_seconds + row.sending_seconds
        table.add_row(
            f"{row.gpus:,}" + (" *" if row.gpus == plan.asked else ""),
            f"{row.images_per_gpu:,}",
            f"{row.batch:,}",
            f"{1000 * step:,.3g}",
            f"{row.sending_seconds / step:.0%}",
            f"{row.images_per_second:,.0f}",
            f"{row.efficiency:.0%}",
            f"{row.hours:,.3g}" if row.hours < 100 else f"{row.hours:,.0f}",
            f"{row.gpu_hours:,.3g}" if row.gpu_hours < 100 else f"{row.gpu_hours:,.0f}",
        )
    return table


def _sent(plan: Plan) -> Table:
    table = _table(
        f"what each of {counted(plan.asked, 'GPU')} sends in a step", "for", ("collective operations", "MB", "ms")
    )
    for purpose in plan.sent:
        table.add_row(
            purpose.name, f"{purpose.operations:,}", f"{purpose.megabytes:,.3g}", f"{1000 * purpose.seconds:,.3g}"
        )
    return table
