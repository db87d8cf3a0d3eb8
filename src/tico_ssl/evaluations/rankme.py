"""RankMe: how many dimensions the features really use (Garrido et al., 2023). Needs no labels."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.evaluations import Context, Result
from tico_ssl.section import Section


class Config(Section):
    """Settings of RankMe."""

    images: Annotated[int, Field(ge=2)] = 25_600
    """At most this many training images."""


def run(context: Context, config: Config) -> Result:
    """RankMe of the backbone features of every representation, and the most that it could be."""
    return context.compare(
        "rankme",
        config,
        lambda features: {
            "rankme": rankme(features.train[: config.images]),
            "width": float(features.train.shape[1]),
        },
    )


def rankme(features: Tensor, epsilon: float = 1e-7) -> float:
    """exp of the entropy of the normalised singular values: 1 for a point, the width for an even spread."""
    singular = torch.linalg.svdvals(features.double())
    share = singular / singular.sum().clamp_min(1e-300) + epsilon
    return float(torch.exp(-(share * share.log()).sum()))
