"""Linear evaluation on iNaturalist 2018 by the paper's schedule: 84 epochs, learning rate / 10 after 24, 48 and 72."""

from typing import Annotated

from pydantic import Field

from tico_ssl.evaluations import linear_augmented
from tico_ssl.evaluations._classification.settings import Positive, Rate
from tico_ssl.evaluations._classification.transfer import TransferSettings
from tico_ssl.results.metrics import TOP1, TOP5, Metric

COST = "head"
METRICS = (TOP1, TOP5, Metric("lr", shown=False))
NOT_IN_ALL = "its schedule is for one data set; ask for it by name"


class Config(TransferSettings):
    """The paper's settings for iNaturalist 2018."""

    epochs: Positive = 84
    """Epochs over the training images; see `least_steps` for small data."""
    lrs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (4.0,)
    """Learning rates for this batch size."""
    decay_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = (
        24 / 84,
        48 / 84,
        72 / 84,
    )
    """schedule=steps: fractions of the training after which the learning rates fall."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """schedule=steps: factor of each fall."""


run, work = linear_augmented.run, linear_augmented.work
