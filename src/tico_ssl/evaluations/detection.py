"""Object detection: Faster R-CNN on top of the backbone, by the paper's schedule for VOC07+12 (VOC or COCO folder).

The baseline is the same detector from a random backbone, trained in the same way.
"""

from tico_ssl.evaluations._detection.protocol import PictureContext, compare, open_picture_context
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Result

COST = "network"
METRICS = (Metric("box_ap*", "%", better="higher", verdict=True), Metric("train_*", "%", better="higher"))
open_context = open_picture_context

NOT_IN_ALL = "it trains a detector on a folder with boxes; ask for it by name"


class Config(Settings):
    """The paper's settings for VOC07+12."""


def run(context: PictureContext, config: Config) -> Result:
    """Average precision of boxes, in per cent."""
    return compare(context, config, masks=False)
