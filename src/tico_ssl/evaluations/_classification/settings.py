"""Settings of a classifier's training; every protocol has its own values. Nothing here imports torch."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tico_ssl.config.section import Section
from tico_ssl.config.views import CropSampling, Interpolation, Probability, Range, ViewPolicy
from tico_ssl.optim.schedules import step_decay, warmup_cosine

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
ENOUGH_STEPS = 1_000  # 20 epochs of 1 % of ImageNet, the smallest data of a published schedule
SMALLEST_BATCH = 16  # that little data are given by default, for the sake of BatchNorm


class Settings(Section):
    """Schedule, batch, optimiser and augmentation."""

    epochs: Positive = 80
    """Epochs over the training images. The default is for the original's data; small data may get more."""
    least_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps, at least. null: data whose epochs make fewer than 1,000 get smaller batches, down to 16 images, and then
    more epochs. If epochs or batch_size are given, the default is 0: nothing is adapted."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images per step, over all processes; at most the size of the data. Small data may get fewer by default."""
    schedule: Literal["cosine", "steps"] = "cosine"
    """Decay of the learning rates: cosine (to zero) or steps."""
    decay_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = (0.6, 0.8)
    """schedule=steps: fractions of the training after which the learning rates fall."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """schedule=steps: factor of each fall."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay; none on biases and normalisation."""
    crop_scale: Range = (0.08, 1.0)
    """Range of a random crop's area, as a fraction of the image's."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Range of a crop's aspect ratio (width / height)."""
    crop_sampling: CropSampling = "clipped"
    """How crops are drawn: clipped as in BYOL, rejection as in torchvision, distorted as in TensorFlow."""
    interpolation: Interpolation = "bicubic"
    """Interpolation of a crop: bicubic or bilinear."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of training; auto: bf16 where it is faster, else fp32. Tests are in fp32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything random: subsets, order, crops, initial weights of the classifier."""

    @model_validator(mode="before")
    @classmethod
    def _exactly_as_given(cls, given: Any) -> Any:
        chosen = isinstance(given, dict) and not given.keys().isdisjoint(("epochs", "batch_size"))
        return {"least_steps": 0, **given} if chosen else given

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        self.policy()  # validates the crop
        return self

    def policy(self) -> ViewPolicy:
        """Augmentation of training images: crop and flip."""
        return ViewPolicy(
            crop_scale=self.crop_scale,
            crop_ratio=self.crop_ratio,
            crop_sampling=self.crop_sampling,
            interpolation=self.interpolation,
            flip=self.flip,
            jitter=0.0,
            greyscale=0.0,
        )

    def batch_of(self, images: int, processes: int = 1) -> int:
        """Images per step: at most all, and divisible by the number of processes. By default so few that the epochs
        make enough steps."""
        size = min(self.batch_size, images)
        if self.least_steps is None:
            size = min(size, max(SMALLEST_BATCH, 2 * processes, self.epochs * images // ENOUGH_STEPS))
        return size // processes * processes

    def epochs_of(self, steps_per_epoch: int) -> int:
        """The number of epochs, given the steps per epoch. Where the smallest batches make too few steps, their number
        is the geometric mean of those and of enough: little data are neither seen too briefly nor all too often."""
        if self.least_steps is None:
            return max(self.epochs, round(math.sqrt(ENOUGH_STEPS * self.epochs / steps_per_epoch)))
        return max(self.epochs, -(-self.least_steps // steps_per_epoch))

    def images_seen(self, images: int) -> int:
        """Images of all steps of a training, each as often as it is seen; none are too few to train on."""
        if (batch := self.batch_of(images)) == 0:
            return 0
        steps_per_epoch = images // batch
        return self.epochs_of(steps_per_epoch) * steps_per_epoch * batch

    def share_of_rate(self, step: int, steps: int) -> float:
        """Factor of the learning rates at a step."""
        if self.schedule == "cosine":
            return warmup_cosine(step, steps, 0, 1.0, 0.0)
        return step_decay(step, steps, self.decay_at, self.decay)


class LinearSettings(Settings):
    """A linear classifier on a frozen backbone: the paper's settings for ImageNet."""

    batch_size: Annotated[int, Field(ge=2)] = 1024
    """Images per step, over all processes; at most the size of the data. Small data may get fewer by default."""
    lrs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (0.4,)
    """Learning rates at this batch size. BYOL tries 0.4, 0.3, 0.2, 0.1 and 0.05."""
    held_out: Positive = 10_009
    """Training images held out to choose among several learning rates; at most a tenth of all."""
    batch_norm: bool = False
    """BatchNorm with trained scale and shift before the classifier, as in VISSL; use learning rates to match (0.01)."""


class FineTuning(Settings):
    """Two learning rates: one for the backbone, one for the classifier, which starts from scratch. Crops are
    torchvision's, as in the programs that the schedules come from (Barlow Twins, VICReg)."""

    crop_sampling: CropSampling = "rejection"
    """How crops are drawn: clipped as in BYOL, rejection as in torchvision, distorted as in TensorFlow."""
    interpolation: Interpolation = "bilinear"
    """Interpolation of a crop: bicubic or bilinear."""
    lr_backbone: Rate = 0.01
    """Learning rate of the backbone at this batch size."""
    lr_head: Rate = 0.1
    """Learning rate of the classifier at this batch size."""
