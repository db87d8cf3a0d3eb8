"""Cost of a run: the time of its steps on an idle machine, and the epochs that a budget buys.

Runs that share a device slow each other down, and not evenly. So each variant is timed alone, on its own images, before
anything is trained in parallel; measurements are kept in the study's folder and reused. Variants that differ only in
rates and weights have the same cost, so one of them is timed for all.
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
    """The measurement of a variant's own file, if it is of steps like this variant's, or None."""
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
    return cost if _work(measured) == work_of(variant) else None


def read_costs(folder: Path, variants: list[Variant]) -> dict[str, Cost]:
    """All known costs, by the name of the variant: its own measurement, or that of another one with equal steps."""
    own = {variant.name: read_cost(folder, variant) for variant in variants}
    work = {variant.name: work_of(variant) for variant in variants}
    shared = {work[name]: cost for name, cost in reversed(own.items()) if cost is not None}
    costs = {name: cost or shared.get(work[name]) for name, cost in own.items()}
    return {name: cost for name, cost in costs.items() if cost is not None}


def work_of(variant: Variant) -> str:
    """What determines the time of a variant's steps; equal for variants that cost the same."""
    return _work(variant.load())


def _work(recipe: Recipe) -> str:
    """Shapes, kinds and counts; of the rates and weights of method and optimiser only whether they are zero."""
    parts = recipe.model_dump(mode="json", exclude={"description"})
    parts["training"] |= {"seed": 0, "epochs": 1, "knn_every_epochs": 0, "knn_images": 1, "linear_probe": False}
    for name in ("method", "optimizer"):
        parts[name] = {key: value != 0 if isinstance(value, float) else value for key, value in parts[name].items()}
    return json.dumps(parts, sort_keys=True)
