"""Settings of the two kinds of classifier. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tico_ssl.config.section import validate
from tico_ssl.evaluations._classification.settings import FineTuning, Positive
from tico_ssl.features.settings import LinearConfig
from tico_ssl.runtime.errors import UserError, suggestion


class LinearHead(LinearConfig):
    """A linear classifier, fitted to the features of the backbone as it is: seconds."""

    head: Literal["linear"] = "linear"
    """What is trained."""
    weight_decays: Annotated[tuple[float, ...], Field(min_length=1, strict=False)] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Candidates; the best on held-out training images is used, and the classifier then fitted to all of them."""


class WholeNetwork(FineTuning):
    """The whole network, trained on augmented images: slower, and better where there are enough of them."""

    head: Literal["whole"] = "whole"
    """What is trained."""
    epochs: Positive = 30
    """Epochs over the training images; see `least_steps` for small data."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of every class's training images that choose the epoch to keep, and are not trained on. 0: the last."""


HEADS: dict[str, type[LinearHead] | type[WholeNetwork]] = {"linear": LinearHead, "whole": WholeNetwork}


def settings_of(changes: Mapping[str, Any]) -> LinearHead | WholeNetwork:
    """The settings that overrides make; `head` says which kind."""
    head = changes.get("head", "linear")
    if head not in HEADS:
        raise UserError(f"finetune: head={head}{suggestion(str(head), HEADS)}")
    return validate(HEADS[head], dict(changes), f"finetune head={head}")
