"""The settings of a classifier's training, of which every protocol has its own values. Nothing here imports torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tico_ssl.config.section import Section
from tico_ssl.config.views import Probability, Range, ViewPolicy
from tico_ssl.optim.schedules import warmup_cosine

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class Settings(Section):
    """How long, in which portions, at which rates."""

    epochs: Positive = 80
    """Passes over the training images."""
    least_steps: Annotated[int, Field(ge=0)] = 1_000
    """Small data get more epochs, so that this many steps are made; as many as 20 epochs of 1 % of ImageNet."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images a step, over all processes; all of them, if there are fewer."""
    schedule: Literal["cosine", "steps"] = "cosine"
    """How the rates fall: along half a cosine to zero, or in steps."""
    decay_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = (0.6, 0.8)
    """Steps: after which shares of the training the rates fall."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Steps: to which share of what they were."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD."""
    nesterov: bool = True
    """Of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of weights; biases and normalisation have none."""
    crop_scale: Range = (0.08, 1.0)
    """Share of a training image's area that a crop keeps."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Width over height of a crop."""
    flip: Probability = 0.5
    """Mirror left and right."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of training; auto: bf16 where it is faster, else fp32. Tests are in fp32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything random: subsets, order, crops, the classifier's first weights."""

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        self.policy()  # which knows what a crop may be
        return self

    def policy(self) -> ViewPolicy:
        """What a training image goes through: crop and flip."""
        crop = {"crop_scale": self.crop_scale, "crop_ratio": self.crop_ratio, "flip": self.flip}
        return ViewPolicy(**crop, jitter=0.0, greyscale=0.0)  # type: ignore[arg-type]

    def epochs_of(self, steps_per_epoch: int) -> int:
        """How many epochs are made of this many steps each."""
        return max(self.epochs, -(-self.least_steps // steps_per_epoch))

    def share_of_rate(self, step: int, steps: int) -> float:
        """What the rates are multiplied by at a step."""
        if self.schedule == "cosine":
            return warmup_cosine(step, steps, 0, 1.0, 0.0)
        return self.decay ** sum(step >= round(share * steps) for share in self.decay_at)


class LinearSettings(Settings):
    """A linear classifier on a frozen backbone: the paper's settings for ImageNet."""

    batch_size: Annotated[int, Field(ge=2)] = 1024
    """Images a step, over all processes; all of them, if there are fewer."""
    lrs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (0.4,)
    """Learning rates for this batch size. BYOL tries 0.4, 0.3, 0.2, 0.1 and 0.05."""
    held_out: Positive = 10_009
    """Training images that choose among several rates; at most a tenth of all."""
    batch_norm: bool = False
    """Normalise each feature by the batch before the classifier, with rates to match (0.01)."""


class FineTuning(Settings):
    """Two rates: one for the backbone, one for the classifier, which begins from nothing."""

    lr_backbone: Rate = 0.01
    """Learning rate of the backbone for this batch size."""
    lr_head: Rate = 0.1
    """Learning rate of the classifier for this batch size."""
