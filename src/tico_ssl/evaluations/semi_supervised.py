"""Semi-supervised: all weights fine-tuned on 1 % and 10 % of the labels, with the paper's learning rates and schedule.

The baseline is an untrained backbone, trained from scratch in the same way.
"""

from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from tico_ssl.evaluations._classification.fine_tuning import fine_tuned
from tico_ssl.evaluations._classification.settings import FineTuning, Positive, Rate
from tico_ssl.evaluations._classification.subsets import listed, share_of_each
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._estimate import Work
from tico_ssl.features.evidence import Scores, over_draws
from tico_ssl.results.metrics import TOP1, TOP5
from tico_ssl.results.record import Numbers, Result

COST = "network"
METRICS = (TOP1, TOP5)


class Config(FineTuning):
    """The paper's settings, the same for both fractions."""

    shares: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1, strict=False)] = (0.01, 0.1)
    """Fractions of the labels, drawn per class, at least one image; smaller subsets are contained in larger ones."""
    list: str | None = None
    """Instead of shares: a text file with one image name per line, such as SimCLR's 1percent.txt."""
    draws: Positive = 1
    """Subsets per fraction; mean and standard deviation are reported."""
    epochs: Positive = 20
    """Epochs over the subset; see `least_steps` for small ones."""
    schedule: Literal["cosine", "steps"] = "steps"
    """Decay of the learning rates: cosine (to zero) or steps."""
    lr_backbone: Rate = 0.002
    """Learning rate of the backbone at this batch size."""
    lr_head: Rate = 0.5
    """Learning rate of the classifier at this batch size."""


def work(context: Context, config: Config) -> Work:
    """Every backbone is trained on every subset, and tested."""
    labels, _ = context.labels()
    subsets = [places for draws in _subsets(context, config, labels).values() for places in draws]
    seen = sum(config.images_seen(len(places)) for places in subsets)
    return Work(len(subsets) * len(context.test), seen).times(len(context.backbones))


def run(context: Context, config: Config) -> Result:
    """Accuracy after fine-tuning on each fraction, in per cent."""
    begun = perf_counter()
    labels, _ = context.labels()
    subsets = _subsets(context, config, labels)
    numbers: dict[str, Numbers] = {}
    for name in context.backbones:
        numbers[name] = Scores()
        for share, places in subsets.items():
            scores = [_measure(context, config, name, share, draw, chosen) for draw, chosen in enumerate(places)]
            numbers[name] = numbers[name] | over_draws(scores)
    images = {share: len(places[0]) for share, places in subsets.items()}
    return context.result(config, numbers, perf_counter() - begun, labelled=images)


def _measure(context: Context, config: Config, name: str, share: str, draw: int, places: Tensor) -> Scores:
    part = f"{name}-{share}" + (f"-{draw}" if draw else "")
    title = f"{context.protocol} {part.replace('-', ' ')}"

    def make(place: Path | None) -> Numbers:
        return fine_tuned(context, config, name, title, place, places)

    found = context.part(config, part, make, name, places)
    return (Scores() | found).renamed(lambda metric: f"{metric}_{share}")


def _subsets(context: Context, config: Config, labels: Tensor) -> dict[str, "list[Tensor]"]:
    """Indices of the labelled images, by the name of the fraction and then by draw."""
    if config.list is not None:
        return {"listed": [listed(context.train, config.list)]}
    return {
        f"{100 * share:g}%": [share_of_each(labels, share, config.seed + draw) for draw in range(config.draws)]
        for share in config.shares
    }
