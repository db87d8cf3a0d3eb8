"""alpha-ReQ: exponent of the power-law decay of the features' spectrum (Agrawal et al., 2022). Needs no labels."""

from time import perf_counter
from typing import Annotated

from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.spectra import PowerLaw, eigenvalues, power_law, some_of, usable
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.errors import UserError

FEWEST = 4  # points for the fit

COST = "features"
METRICS = (Metric("alpha", digits=3, better="near 1", among_runs=True), Metric("alpha_r2", digits=3))


class Config(Section):
    """Range of the power-law fit."""

    images: Annotated[int, Field(ge=2)] = 25_600
    """Training images, at most, spread evenly."""
    first: Annotated[int, Field(ge=1)] = 5
    """Index of the first eigenvalue of the fit, from 1: the largest few follow no power law."""
    last: Annotated[int, Field(ge=2)] | None = None
    """Index of the last; by default half of those above rounding error, since few images bend the tail."""


def run(context: Context, config: Config) -> Result:
    """The exponent for every backbone's features, and the R² of the fit."""
    begun = perf_counter()
    features = {name: some_of(context.features(name).train, config.images) for name in context.backbones}
    fits = {name: fitted(eigenvalues(values), config) for name, values in features.items()}
    numbers: dict[str, Numbers] = {name: {"alpha": fit.alpha, "alpha_r2": fit.r2} for name, fit in fits.items()}
    ranges = {name: [fit.first, fit.last] for name, fit in fits.items()}
    return context.result(config, numbers, perf_counter() - begun, fitted=ranges)


def fitted(spectrum: Tensor, config: Config) -> PowerLaw:
    """The power law of a spectrum in the configured range; a UserError where it cannot be fitted."""
    above = usable(spectrum)
    last = above // 2 if config.last is None else min(config.last, above)
    if last - config.first + 1 < FEWEST:
        raise UserError(
            f"alpha-req needs at least {FEWEST} eigenvalues, and from {config.first} to {last} there are fewer "
            f"({above} are above rounding error): give more images or lower first"
        )
    return power_law(spectrum, config.first, last)
