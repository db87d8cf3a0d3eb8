"""Linear evaluation on another data set than that of pretraining, by the paper's schedules. Nothing here imports
torch."""

from typing import Annotated, Literal

from pydantic import Field

from tico_ssl.config.views import CropSampling, Interpolation
from tico_ssl.evaluations._classification.settings import LinearSettings


class TransferSettings(LinearSettings):
    """Shared by these schedules. The paper does not give the batch size; this is its predecessors', like the crops,
    which are torchvision's."""

    crop_sampling: CropSampling = "rejection"
    """How crops are drawn: clipped as in BYOL, rejection as in torchvision, distorted as in TensorFlow."""
    interpolation: Interpolation = "bilinear"
    """Interpolation of a crop: bicubic or bilinear."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images per step, over all processes; at most the size of the data. Small data may get fewer by default."""
    schedule: Literal["cosine", "steps"] = "steps"
    """Decay of the learning rates: cosine (to zero) or steps."""
    nesterov: bool = False
    """Nesterov momentum."""
