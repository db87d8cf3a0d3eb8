"""Settings of the quick evaluations of frozen features. Nothing here imports torch."""

from typing import Annotated

from pydantic import Field

from tico_ssl.config.section import Section


class Voters(Section):
    """How many neighbours vote, and how sharply near ones outweigh far ones."""

    k: Annotated[int, Field(ge=1)]
    """Neighbours."""
    temperature: Annotated[float, Field(gt=0)]
    """A vote counts exp(cosine / temperature)."""


class KnnConfig(Section):
    """The two settings in common use: DINO's and MoCo's."""

    voters: Annotated[tuple[Voters, ...], Field(min_length=1, strict=False)] = (
        Voters(k=20, temperature=0.07),
        Voters(k=200, temperature=0.1),
    )
    """Every pair is reported; all of them take one search for neighbours."""


class LinearConfig(Section):
    """Settings of the probe."""

    weight_decays: Annotated[tuple[float, ...], Field(min_length=1, strict=False)] = (1e-5, 1e-4, 1e-3, 1e-2)
    """Candidates, of which the best on held-out training images is taken."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training images that choose the decay."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Of L-BFGS."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the choice of held-out images."""
