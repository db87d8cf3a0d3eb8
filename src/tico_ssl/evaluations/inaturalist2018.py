"""Linear evaluation on iNaturalist 2018 by the paper's schedule: 84 epochs, a tenth of the rate after 24, 48 and 72."""

from typing import Annotated, Literal

from pydantic import Field

from tico_ssl.evaluations import linear_augmented
from tico_ssl.evaluations._classification.settings import Positive, Rate
from tico_ssl.evaluations._context import Context
from tico_ssl.results.record import Result

NOT_IN_ALL = "the schedule of one data set; ask for it by name"


class Config(linear_augmented.Config):
    """The paper's settings for iNaturalist 2018; it does not give the batch, which is that of its predecessors."""

    epochs: Positive = 84
    """Passes over the training images."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images a step, over all processes; all of them, if there are fewer."""
    lrs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (4.0,)
    """Learning rates for this batch size."""
    schedule: Literal["cosine", "steps"] = "steps"
    """How the rates fall: along half a cosine to zero, or in steps."""
    decay_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = (
        24 / 84,
        48 / 84,
        72 / 84,
    )
    """Steps: after which shares of the training the rates fall."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Steps: to which share of what they were."""
    nesterov: bool = False
    """Of SGD."""


def run(context: Context, config: Config) -> Result:
    """Accuracy of the classifier on the test images, in per cent."""
    return linear_augmented.evaluate_frozen(context, config, "inaturalist2018")
