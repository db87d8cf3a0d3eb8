"""Linear evaluation on another data set than that of pretraining, by the schedules of the paper. Nothing here imports
torch."""

from typing import Annotated, Literal

from pydantic import Field

from tico_ssl.evaluations._classification.settings import LinearSettings


class TransferSettings(LinearSettings):
    """What these schedules share. The paper does not give the batch, which is that of its predecessors."""

    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images a step, over all processes; all of them, if there are fewer."""
    schedule: Literal["cosine", "steps"] = "steps"
    """How the rates fall: along half a cosine to zero, or in steps."""
    nesterov: bool = False
    """Of SGD."""
