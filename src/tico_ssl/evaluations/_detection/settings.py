"""Settings of detection and segmentation. The defaults are the paper's for VOC07+12; with C4, MoCo's."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from tico_ssl.config.section import Section, validate
from tico_ssl.config.sections import Precision
from tico_ssl.optim.schedules import step_decay
from tico_ssl.runtime.wording import counted

Positive = Annotated[int, Field(ge=1)]
Side = Annotated[int, Field(ge=32)]


class Settings(Section):
    """Network, schedule and input of a detector; all its layers are trained."""

    c4_defaults: ClassVar[dict[str, Any]] = {"lr": 0.02, "warmup_iterations": 100}  # pascal_voc_R_50_C4_24k_moco.yaml
    published_images: ClassVar[int] = 16_551  # VOC07+12, for which the number of iterations is

    neck: Literal["fpn", "c4"] = "fpn"
    """fpn: a feature pyramid over all four stages, as in the paper. c4: proposals from the third stage, the fourth as
    box head, as in MoCo, whose schedule it then has unless set otherwise."""
    neck_norm: bool = True
    """BatchNorm in the new layers: the pyramid's convolutions, or after the fourth stage (c4)."""
    iterations: Positive = 24_000
    """Training steps. The default is for VOC; a COCO folder of N < 16,551 images gets sqrt(N / 16,551) of it and of the
    warm-up."""
    batch_size: Positive = 16
    """Images per step, over all processes."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd: the paper's. adamw: learns faster from little data, with lr .0003 to .001 and weight_decay .05."""
    lr: Annotated[float, Field(gt=0)] = 0.15
    """Learning rate at this batch size (c4: 0.02); with SGD, scale both together."""
    decay_at: Annotated[tuple[float, ...], Field(strict=False)] = (18 / 24, 22 / 24)
    """Fractions of the iterations after which the learning rate is divided by 10."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 1_000
    """Iterations of linear warm-up from `warmup_factor` times the learning rate (c4 on VOC: 100)."""
    warmup_factor: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Initial factor of the learning rate in the warm-up."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Weight decay; none on normalisation layers."""
    sizes: Annotated[tuple[Side, ...], Field(min_length=1, strict=False)] = tuple(range(480, 801, 32))
    """Shorter sides in training, in pixels; one is drawn per image."""
    test_size: Side = 800
    """Shorter side in testing, in pixels."""
    longest: Side = 1333
    """Longer side, at most, in pixels."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip in training."""
    anchor_scale: Annotated[float, Field(gt=0)] = 8.0
    """Side of an anchor in strides of its level: 8 gives 32 to 512 pixels. Lower it for small images."""
    width: Annotated[int, Field(ge=8)] = 256
    """Channels of the pyramid and the mask head; the box head has four times as many."""
    proposals: Positive = 1_000
    """Proposals per image after non-maximum suppression (c4 in training: twice as many)."""
    regions: Positive = 512
    """Regions per image that the box head is trained on; at most a quarter are objects."""
    precise_norm: Annotated[int, Field(ge=0)] = 200
    """Batches over which BatchNorm statistics are re-estimated before scoring; 0: those of training."""
    score_every: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations on the test images; 0: only before and after training."""
    score_train_images: Annotated[int, Field(ge=0)] = 0
    """Training images to score too (metrics train_...), as a check that the detector learns."""
    log_every: Positive = 20
    """Iterations between log lines."""
    checkpoint_every: Positive = 1_000
    """Iterations between checkpoints, from which the same command resumes."""
    drawn: Annotated[int, Field(ge=0)] = 12
    """Test images to draw with their detections."""
    precision: Precision = "auto"
    """auto: bf16 on GPUs that support it, else fp32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of new layers, untrained backbone, order, sizes, flips and sampled regions."""
    workers: Positive | None = None
    """Processes that read images; by default one per processor, at most 16. Does not change results."""

    @model_validator(mode="wrap")
    @classmethod
    def _moco_with_c4(cls, given: Any, handler: ModelWrapValidatorHandler["Settings"]) -> "Settings":
        """The defaults depend on the neck: the learning rates of the two protocols differ by a factor of up to 7.5."""
        if not (isinstance(given, dict) and given.get("neck") == "c4"):
            return handler(given)
        settings = handler({**cls.c4_defaults, **given})
        settings.model_fields_set.intersection_update(given)  # defaults are not given, these neither
        return settings

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations {self.warmup_iterations} must be below iterations {self.iterations}: set both"
            )
        if any(not 0 < share <= 1 for share in self.decay_at):
            raise ValueError("decay_at takes fractions of the iterations, above 0 and at most 1")
        if self.longest < max(*self.sizes, self.test_size):
            raise ValueError(f"longest {self.longest} is below a shorter side (sizes, test_size)")
        if self.precision == "fp64":
            raise ValueError("detectors do not support precision fp64")
        return self

    def for_images(self, images: int) -> "Settings":
        """Iterations for fewer images than the published number: the geometric mean of as many and of as many epochs.
        What is given stays."""
        share = math.sqrt(min(1.0, images / self.published_images))
        scaled = {name: max(1, round(share * getattr(self, name))) for name in ("iterations", "warmup_iterations")}
        scaled = {} if share == 1 else {k: v for k, v in scaled.items() if k not in self.model_fields_set}
        if "iterations" not in scaled:
            return self
        return validate(type(self), self.model_dump() | scaled, counted(images, "image"))

    def lr_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up times step decay."""
        lr = self.lr * step_decay(step, self.iterations, self.decay_at, 0.1)
        if step < self.warmup_iterations:
            done = step / self.warmup_iterations
            lr *= self.warmup_factor * (1 - done) + done
        return lr


RESULTLESS = {"log_every", "checkpoint_every", "drawn", "workers"}
"""Settings that influence neither weights nor scores."""
