"""Settings of the quick evaluations of frozen features. Nothing here imports torch."""

from typing import Annotated

from pydantic import Field

from tico_ssl.config.section import Section


class Voters(Section):
    """Number of neighbours, and the temperature of their votes."""

    k: Annotated[int, Field(ge=1)]
    """Number of neighbours."""
    temperature: Annotated[float, Field(gt=0)]
    """A vote has weight exp(cosine / temperature)."""


class KnnConfig(Section):
    """The two settings in common use: DINO's and MoCo's."""

    voters: Annotated[tuple[Voters, ...], Field(min_length=1, strict=False)] = (
        Voters(k=20, temperature=0.07),
        Voters(k=200, temperature=0.1),
    )
    """Pairs of k and temperature; each is reported."""


class LinearConfig(Section):
    """Settings of the linear probe."""

    weight_decays: Annotated[tuple[float, ...], Field(min_length=1, strict=False)] = (1e-5, 1e-4, 1e-3, 1e-2)
    """Candidates; the best on held-out training images is used."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the training images held out to choose the weight decay."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """L-BFGS iterations, at most."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the held-out images."""
