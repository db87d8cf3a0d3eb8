"""Linear probe: softmax regression on frozen, standardised features.

The fast form, on features of unaugmented images: full-batch L-BFGS, weight decay chosen on held-out training images.
"""

from tico_ssl.evaluations._context import Context
from tico_ssl.features.linear import probe
from tico_ssl.features.settings import LinearConfig as Config
from tico_ssl.results.metrics import TOP1, TOP5, Metric
from tico_ssl.results.record import Result

COST = "features"
METRICS = (TOP1, TOP5, Metric("weight_decay", shown=False))


def run(context: Context, config: Config) -> Result:
    """Accuracy of a linear classifier on every representation, in per cent."""
    context.labels()
    return context.compare(config, lambda features: probe(features, config, context.device))
