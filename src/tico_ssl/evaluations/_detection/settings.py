"""What decides a detection or segmentation protocol. The defaults are the paper's for VOC07+12."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tico_ssl.config.section import Section
from tico_ssl.config.sections import Precision

Positive = Annotated[int, Field(ge=1)]
Side = Annotated[int, Field(ge=32)]


class Settings(Section):
    """Network, schedule and input of a detector; all its layers are trained."""

    neck: Literal["fpn", "c4"] = "fpn"
    """fpn: a feature pyramid over all four stages. c4: proposals from the third stage, the fourth as box head."""
    neck_norm: bool = True
    """BatchNorm in the new layers: the pyramid's convolutions, or after the fourth stage (c4)."""
    iterations: Positive = 24_000
    """Steps of training."""
    batch_size: Positive = 16
    """Images per step, over all processes together."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd: the paper's. adamw: learns little data sooner, with lr .0003 to .001 and weight_decay .05."""
    lr: Annotated[float, Field(gt=0)] = 0.15
    """Learning rate for this batch size; of SGD, change both in proportion."""
    decay_at: Annotated[tuple[float, ...], Field(strict=False)] = (18 / 24, 22 / 24)
    """Shares of the iterations after which the rate is a tenth of what it was."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 1_000
    """Iterations in which the rate rises in a line from `warmup_factor` times its value."""
    warmup_factor: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Where the warm-up begins."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Of everything but normalisation layers."""
    sizes: Annotated[tuple[Side, ...], Field(min_length=1, strict=False)] = tuple(range(480, 801, 32))
    """Pixels of the shorter side in training, one drawn for each image."""
    test_size: Side = 800
    """And in testing."""
    longest: Side = 1333
    """The longer side has no more pixels than this."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """How often a training image is mirrored."""
    anchor_scale: Annotated[float, Field(gt=0)] = 8.0
    """Side of an anchor in strides of its level: 8 makes 32 to 512 pixels. Less for small images."""
    width: Annotated[int, Field(ge=8)] = 256
    """Channels of the pyramid and of the mask head; the box head has four times as many."""
    proposals: Positive = 1_000
    """Proposals an image that are kept after non-maximum suppression (c4 in training: twice as many)."""
    regions: Positive = 512
    """Regions an image that the box head is trained on, a quarter of them objects."""
    precise_norm: Annotated[int, Field(ge=0)] = 200
    """Batches over which the statistics of BatchNorm are averaged anew before scoring; 0: as training left them."""
    score_every: Annotated[int, Field(ge=0)] = 0
    """Iterations between two scorings on the test images; 0: only before and after training."""
    score_train_images: Annotated[int, Field(ge=0)] = 0
    """Score so many training images too (train_...): does it learn at all?"""
    log_every: Positive = 20
    """Iterations between two lines of losses."""
    checkpoint_every: Positive = 1_000
    """Iterations between two checkpoints, from which the same command goes on."""
    drawn: Annotated[int, Field(ge=0)] = 12
    """Test images that are drawn with what was found in them."""
    precision: Precision = "auto"
    """auto: bf16 on GPUs that have it, else fp32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the new layers, of the untrained backbone, of order, sizes, flips and sampled regions."""
    workers: Positive | None = None
    """Processes that read images; by default one for each processor, 16 at most. Changes no result."""

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations {self.warmup_iterations} must be below iterations {self.iterations}: set both"
            )
        if any(not 0 < share <= 1 for share in self.decay_at):
            raise ValueError("decay_at has shares of the iterations, above 0 and at most 1")
        if self.longest < max(*self.sizes, self.test_size):
            raise ValueError(f"longest {self.longest} is below a shorter side (sizes, test_size)")
        if self.precision == "fp64":
            raise ValueError("precision fp64 is not for detectors")
        return self

    def lr_at(self, step: int) -> float:
        """The rate of a step: linear warm-up times steps down."""
        lr = self.lr * 0.1 ** sum(step >= round(share * self.iterations) for share in self.decay_at)
        if step < self.warmup_iterations:
            done = step / self.warmup_iterations
            lr *= self.warmup_factor * (1 - done) + done
        return lr


RESULTLESS = {"log_every", "checkpoint_every", "drawn", "workers"}
"""Settings without influence on weights and scores."""
