"""What a run costs: the time of its steps while nothing else is at work, and the epochs that a budget buys.

Runs that share a device slow each other down, and not evenly. So each variant is timed alone, on its own images, before
anything is trained side by side; what was measured is kept in the study's folder, and a study that goes on uses it.
"""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tico_ssl.bench.stages import LR, PROGRESS, Subject, in_full_flow
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.recipe import Recipe, dump_recipe, load_recipe, parse_yaml
from tico_ssl.config.study import Budget, Variant
from tico_ssl.config.views import shorter_side
from tico_ssl.data.sources import open_training
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.runtime.device import choose_device, resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.training.pretrain import build_method
from tico_ssl.training.step import Step

TIMED_SECONDS = 4.0
FEWEST_STEPS = 10


@dataclass(frozen=True)
class Cost:
    """The measured time of a variant, and what it was measured on."""

    seconds_per_step: float
    steps_per_epoch: int
    batch_size: int
    device: str
    threads: int
    recipe: str

    @property
    def epoch_seconds(self) -> float:
        """Of the steps of an epoch."""
        return self.seconds_per_step * self.steps_per_epoch

    @property
    def images_per_second(self) -> float:
        """That are trained on."""
        return self.batch_size / self.seconds_per_step


def epochs_for(budget: Budget | None, variant: Variant, costs: dict[str, Cost]) -> int | None:
    """How many epochs a budget buys a variant; None: those of its own recipe."""
    if budget is None or not budget.timed:
        return budget.epochs if budget else None
    seconds = budget.seconds
    if seconds is None:
        assert budget.epochs is not None
        assert budget.epochs_of is not None
        seconds = budget.epochs * costs[budget.epochs_of].epoch_seconds
    return max(1, round(seconds / costs[variant.name].epoch_seconds))


def measure(recipe: Recipe[Any]) -> Cost:
    """Time the steps of a recipe, from images to the moved target, as training makes them."""
    device = choose_device()
    settings, precision = recipe.training, resolve_precision(recipe.training.precision, device)
    source = open_training(recipe.data, recipe.backbone.channels, shorter_side(recipe.views, recipe.data.image_size))
    subject = Subject.of(recipe, device, precision, source)
    method = build_method(recipe, device, precision)
    method.check_data(len(source), source.labels)
    optimizer = build_optimizer(method, recipe.optimizer)
    step = Step(
        method,
        method,
        optimizer,
        subject.views,
        precision,
        device,
        settings.clip_gradient,
        settings.execution,
        settings.parts,
    )
    portions = subject.portions()
    flow = in_full_flow(subject)
    flow["at_least"] = max(FEWEST_STEPS, flow.get("at_least", 0))
    times = time_calls(lambda: step(next(portions), LR, PROGRESS), TIMED_SECONDS, device, **flow)
    return Cost(
        statistics.fmean(times),
        subject.loader.steps_per_epoch,
        settings.batch_size,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        torch.get_num_threads(),
        dump_recipe(recipe),
    )


def cost_file(folder: Path, variant: Variant) -> Path:
    """Where the cost of a variant is kept."""
    return folder / "costs" / f"{variant.name}.json"


def write_cost(folder: Path, variant: Variant) -> None:
    """Measure a variant and keep what was measured."""
    write_atomically(cost_file(folder, variant), json.dumps(asdict(measure(variant.load())), indent=2) + "\n")


def read_cost(folder: Path, variant: Variant) -> Cost | None:
    """What was measured for just this recipe, if it was."""
    file = cost_file(folder, variant)
    if not file.is_file():
        return None
    cost = Cost(**json.loads(file.read_text(encoding="utf-8")))
    try:
        measured = load_recipe(parse_yaml(cost.recipe, str(file)))
    except UserError:  # of another version of this package
        return None
    return cost if _timed(measured) == _timed(variant.load()) else None


def read_costs(folder: Path, variants: list[Variant]) -> dict[str, Cost]:
    """All that was measured, by the name of the variant."""
    found = {variant.name: read_cost(folder, variant) for variant in variants}
    return {name: cost for name, cost in found.items() if cost is not None}


def _timed(recipe: Recipe[Any]) -> Recipe[Any]:
    """All of a recipe that the time of its steps depends on."""
    training = recipe.training.model_copy(
        update={"seed": 0, "epochs": 1, "knn_every_epochs": 0, "knn_images": 1, "linear_probe": False}
    )
    return recipe.model_copy(update={"training": training, "description": ""})
