"""kNN: weighted votes of the nearest training features by cosine similarity."""

from tico_ssl.evaluations._context import Context
from tico_ssl.features.knn import knn_accuracy
from tico_ssl.features.settings import KnnConfig as Config
from tico_ssl.results.metrics import TOP1
from tico_ssl.results.record import Result

COST = "features"
METRICS = (TOP1,)


def run(context: Context, config: Config) -> Result:
    """kNN accuracy of every representation, in per cent."""
    context.labels()
    return context.compare(
        config, lambda features: knn_accuracy(features, config, context.device, "nearest neighbours")
    )
