"""LiDAR: number of directions that separate images rather than their views (Thilak et al., 2023). Needs no labels."""

from time import perf_counter
from typing import Annotated

from pydantic import Field

from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.augmented import views_of_images
from tico_ssl.evaluations._representation.projectors import embeddings
from tico_ssl.evaluations._representation.settings import ViewSettings
from tico_ssl.evaluations._representation.spectra import lidar
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result

COST = "head"
METRICS = (Metric("*lidar", better="higher", among_runs=True), Metric("width", shown=False))


class Config(ViewSettings):
    """Each image is a class, and its views are the samples."""

    views: Annotated[int, Field(ge=2)] = 10
    """Views per image. The authors use 50, of 1,000 images."""
    delta: Annotated[float, Field(gt=0)] = 1e-4
    """Added to the diagonal of the within-image covariance."""


def run(context: Context, config: Config) -> Result:
    """LiDAR of every backbone's features, of the embedding where there is a projector, and the upper bound: the width,
    or the number of images minus one."""
    begun = perf_counter()
    views = views_of_images(context, config, config.views)
    embedded = embeddings(context, views)
    numbers: dict[str, Numbers] = {}
    for name, values in views.items():
        most = float(min(values.shape[2], len(values) - 1))
        numbers[name] = {"lidar": lidar(values, config.delta), "width": most}
        if name in embedded:
            numbers[name]["embedding_lidar"] = lidar(embedded[name], config.delta)
    return context.result(config, numbers, perf_counter() - begun)
