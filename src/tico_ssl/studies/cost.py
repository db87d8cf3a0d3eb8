"""Cost of a run: the time of its steps on an idle machine, and the epochs that a budget buys.

Runs that share a device slow each other down, and not evenly. So each variant is timed alone, on its own images, before
anything is trained in parallel; measurements are kept in the study's folder and reused.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.config.study import Budget, Variant
from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.runtime.files import write_atomically


@dataclass(frozen=True)
class Cost:
    """The measured time of a variant, and the conditions of the measurement."""

    seconds_per_step: float
    steps_per_epoch: int
    batch_size: int
    device: str
    threads: int
    recipe: str

    @property
    def epoch_seconds(self) -> float:
        """Seconds of an epoch's steps."""
        return self.seconds_per_step * self.steps_per_epoch

    @property
    def images_per_second(self) -> float:
        """Training throughput."""
        return self.batch_size / self.seconds_per_step


def epochs_for(budget: Budget | None, variant: Variant, costs: dict[str, Cost]) -> int | None:
    """The epochs that a budget buys for a variant; None: those of its recipe."""
    if budget is None or not budget.timed:
        return budget.epochs if budget else None
    seconds = budget.seconds
    if seconds is None:
        assert budget.epochs is not None
        assert budget.epochs_of is not None
        seconds = budget.epochs * costs[budget.epochs_of].epoch_seconds
    return max(1, round(seconds / costs[variant.name].epoch_seconds))


def cost_file(folder: Path, variant: Variant) -> Path:
    """The file of a variant's cost."""
    return folder / "costs" / f"{variant.name}.json"


def write_cost(folder: Path, variant: Variant, cost: Cost) -> None:
    """Write a measurement."""
    write_atomically(cost_file(folder, variant), json.dumps(asdict(cost), indent=2) + "\n")


def read_cost(folder: Path, variant: Variant) -> Cost | None:
    """The measurement of exactly this recipe, or None."""
    file = cost_file(folder, variant)
    if not file.is_file():
        return None
    try:
        cost = Cost(**json.loads(file.read_bytes()))
        measured = load_recipe(parse_yaml(cost.recipe, str(file)))
        sound = cost.seconds_per_step > 0 and cost.steps_per_epoch > 0 and cost.batch_size > 0
    except (ValueError, TypeError, AttributeError, RecursionError):  # damaged, or of another version of this package
        return None
    if not sound:
        return None
    return cost if _timed(measured) == _timed(variant.load()) else None


def read_costs(folder: Path, variants: list[Variant]) -> dict[str, Cost]:
    """All measurements, by the name of the variant."""
    found = {variant.name: read_cost(folder, variant) for variant in variants}
    return {name: cost for name, cost in found.items() if cost is not None}


def _timed(recipe: Recipe) -> Recipe:
    """The part of a recipe that determines the time of its steps."""
    training = recipe.training.model_copy(
        update={"seed": 0, "epochs": 1, "knn_every_epochs": 0, "knn_images": 1, "linear_probe": False}
    )
    return recipe.model_copy(update={"training": training, "description": ""})
