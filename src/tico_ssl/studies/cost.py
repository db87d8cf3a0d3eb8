"""What a run costs: the time of its steps while nothing else is at work, and the epochs that a budget buys.

Runs that share a device slow each other down, and not evenly. So each variant is timed alone, on its own images, before
anything is trained side by side; what was measured is kept in the study's folder, and a study that goes on uses it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tico_ssl.config.recipe import Recipe, load_recipe, parse_yaml
from tico_ssl.config.study import Budget, Variant
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically


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


def cost_file(folder: Path, variant: Variant) -> Path:
    """Where the cost of a variant is kept."""
    return folder / "costs" / f"{variant.name}.json"


def write_cost(folder: Path, variant: Variant, cost: Cost) -> None:
    """Keep what was measured."""
    write_atomically(cost_file(folder, variant), json.dumps(asdict(cost), indent=2) + "\n")


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
