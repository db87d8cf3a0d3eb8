"""RankMe: effective rank of the features (Garrido et al., 2023). Needs no labels."""

from time import perf_counter
from typing import Annotated

from pydantic import Field

from tico_ssl.config.section import Section
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.projectors import embeddings
from tico_ssl.evaluations._representation.spectra import rankme, some_of
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result

COST = "features"
METRICS = (Metric("*rankme", better="higher", among_runs=True), Metric("width", shown=False))


class Config(Section):
    """Settings of RankMe."""

    images: Annotated[int, Field(ge=2)] = 25_600
    """Training images, at most, spread evenly."""


def run(context: Context, config: Config) -> Result:
    """RankMe of every backbone's features, of the embedding where there is a projector, and the width."""
    begun = perf_counter()
    features = {name: some_of(context.features(name).train, config.images) for name in context.backbones}
    embedded = embeddings(context, features)
    numbers: dict[str, Numbers] = {}
    for name, values in features.items():
        numbers[name] = {"rankme": rankme(values), "width": float(values.shape[1])}
        if name in embedded:
            numbers[name]["embedding_rankme"] = rankme(embedded[name])
    return context.result(config, numbers, perf_counter() - begun)
