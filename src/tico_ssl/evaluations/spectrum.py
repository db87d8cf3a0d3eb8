"""Spectrum: the eigenvalues of the features' covariance, and effective ranks. Needs no labels."""

from time import perf_counter
from typing import Annotated

from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.projectors import embeddings
from tico_ssl.evaluations._representation.spectra import (
    eigenvalues,
    entropy_rank,
    participation_ratio,
    some_of,
    thinned,
)
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

COST = "features"
METRICS = (Metric("*largest_share", "%"), Metric("*"))


class Config(Section):
    """Images, and points of the curve."""

    images: Annotated[int, Field(ge=2)] = 25_600
    """Training images, at most, spread evenly."""
    points: Annotated[int, Field(ge=2)] = 48
    """Eigenvalues kept in the result for plotting, evenly spaced on a logarithmic axis."""


def run(context: Context, config: Config) -> Result:
    """For every backbone's features, and for the embedding where there is a projector. The eigenvalues are in the
    result's data, under `spectra`."""
    begun = perf_counter()
    features = {name: some_of(context.features(name).train, config.images) for name in context.backbones}
    embedded = embeddings(context, features)
    numbers: dict[str, Numbers] = {}
    spectra = {}
    short = {(len(values), values.shape[1]) for values in features.values() if len(values) <= values.shape[1]}
    for images, width in sorted(short):
        say(f"spectrum: {counted(images, 'image')} cannot span {width:,} dimensions; give more")
    for name, values in features.items():
        found = eigenvalues(values)
        numbers[name] = measures(found)
        spectra[name] = thinned(found, config.points)
        if name in embedded:
            found = eigenvalues(embedded[name])
            numbers[name] |= {f"embedding_{metric}": value for metric, value in measures(found).items()}
            spectra[f"{name} embedding"] = thinned(found, config.points)
    return context.result(config, numbers, perf_counter() - begun, spectra=spectra)


def measures(spectrum: Tensor) -> Numbers:
    """Three effective dimensions, which agree if all eigenvalues are equal, and the share of the largest in per cent.

    The effective rank is the exponential of an entropy: of variances (eigenvalues), or of standard deviations (singular
    values; Roy and Vetterli, 2007). The second gives weak directions more weight.
    """
    return {
        "rank_by_variance": entropy_rank(spectrum),
        "rank_by_deviation": entropy_rank(spectrum.sqrt()),
        "participation_ratio": participation_ratio(spectrum),
        "largest_share": 100 * float(spectrum[0] / spectrum.sum().clamp_min(1e-300)),
    }
