"""Alignment of views of an image, and uniformity of images (Wang and Isola, 2020). Needs no labels."""

from time import perf_counter
from typing import Annotated

from pydantic import Field
from torch import Tensor

from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.augmented import views_of_images
from tico_ssl.evaluations._representation.projectors import embeddings
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.evaluations._representation.sphere import distances, uniformity
from tico_ssl.features.evidence import Scores, mean_of
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result

COST = "head"
METRICS = (
    Metric("*alignment", digits=3, better="lower", among_runs=True),
    Metric("*uniformity", digits=3, better="lower", among_runs=True),
)


class Config(ViewSettings):
    """Two views of each image."""

    t: Annotated[float, Field(gt=0)] = 2.0
    """Uniformity is the log of the mean of exp(-t * squared distance)."""


def run(context: Context, config: Config) -> Result:
    """Both metrics for every backbone's features, and for the embedding where there is a projector. Lower is better."""
    begun = perf_counter()
    views = views_of_images(context, config, 2)
    embedded = embeddings(context, views)
    numbers: dict[str, Numbers] = {}
    for name, values in views.items():
        found = _both(values, config.t)
        if name in embedded:
            found |= _both(embedded[name], config.t).renamed("embedding_{}".format)
        numbers[name] = found
    return context.result(config, numbers, perf_counter() - begun)


def _both(views: Tensor, t: float) -> Scores:
    """Uniformity is computed on the first views. It is no mean over images but the logarithm of one over pairs, and has
    no interval."""
    return mean_of("alignment", distances(views[:, 0], views[:, 1])) | {"uniformity": uniformity(views[:, 0], t)}
