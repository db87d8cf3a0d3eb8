"""Instance segmentation: Mask R-CNN on top of the backbone, by the paper's schedule for COCO (COCO folder).

The baseline is the same network from a random backbone, trained in the same way.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from tico_ssl.evaluations._detection.protocol import PictureContext, compare, open_picture_context
from tico_ssl.evaluations._detection.settings import Positive, Settings, Side
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Result

COST = "network"
METRICS = (
    Metric("box_ap*", "%", better="higher", verdict=True),
    Metric("mask_ap*", "%", better="higher"),
    Metric("train_*", "%", better="higher"),
)
open_context = open_picture_context

NOT_IN_ALL = "it trains a detector on a folder with boxes; ask for it by name"


class Config(Settings):
    """The paper's settings for COCO: detectron2's 1x schedule with a different learning rate."""

    c4_defaults: ClassVar[dict[str, Any]] = {"lr": 0.02, "iterations": 180_000}  # coco_R_50_C4_2x_moco.yaml

    published_images: ClassVar[int] = 100_000  # COCO's train2017 has 117,266 with objects

    iterations: Positive = 90_000
    """Training steps (c4: 180,000, MoCo's 2x schedule; its 1x has 90,000). The default is for COCO; a folder of N <
    100,000 images gets sqrt(N / 100,000) of it, and of the warm-up."""
    lr: Annotated[float, Field(gt=0)] = 0.08
    """Learning rate at this batch size (c4: 0.02); with SGD, scale both together."""
    decay_at: Annotated[tuple[float, ...], Field(strict=False)] = (6 / 9, 8 / 9)
    """Fractions of the iterations after which the learning rate is divided by 10."""
    sizes: Annotated[tuple[Side, ...], Field(min_length=1, strict=False)] = tuple(range(640, 801, 32))
    """Shorter sides in training, in pixels; one is drawn per image."""


def run(context: PictureContext, config: Config) -> Result:
    """Average precision of boxes and of masks, in per cent."""
    return compare(context, config, masks=True)
