"""The sections that every recipe has beside its views and its method: data, backbone, optimizer and training."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tico_ssl.config.section import Section

Values = Annotated[tuple[float, ...], Field(strict=False)]


class DataConfig(Section):
    """Which images, and what the network is shown of them."""

    source: str | list[str] = "textures"
    """A folder of images (with or without class folders, with or without train/ and test/; ImageNet, Tiny-ImageNet,
    Places-205, iNaturalist 2018 and VOC2007 as they are handed out), several of them, a text file of paths, a packed,
    .npz, .npy, .tar or .parquet file, or a name: textures, cifar10, cifar100, stl10, ... `FORMAT:` before a place says
    how to read it, also by a module of your own: my_lab.formats.dicom:scans/. Empty: --data says it."""
    root: str = "data"
    """Where data sets that are given by name lie on disk."""
    download: bool = False
    """Fetch a data set that is given by name when it is not there."""
    image_size: Annotated[int, Field(ge=8)] = 32
    """Pixels of the square that the network sees."""
    reduced_decoding: bool = True
    """Decode large JPEGs at a half, a quarter or an eighth of their size where even the smallest crop keeps the view's
    pixels."""
    most_bad: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of unreadable files above which a run stops before it begins."""
    on_gpu: bool = True
    """Keep arrays and packed squares on the GPU if all of them take less than two fifths of its free memory."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Train on this many images, drawn evenly from the whole (textures: draw this many)."""
    mean: Values = (0.485, 0.456, 0.406)
    """Mean of each channel, taken off; ImageNet's by default."""
    std: Values = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, divided by."""


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


BACKBONE_LIBRARIES = ("torchvision", "timm", "tico")


class BackboneConfig(Section):
    """The network that is trained and kept."""

    name: str = "torchvision/resnet50"
    """library/model: torchvision/..., timm/..., or tico/resnet18-w16 (any width)."""
    stem: Literal["auto", "standard", "small"] = "auto"
    """ResNets: 'small' is a 3x3 convolution without max-pool; 'auto' takes it for images up to 64 pixels."""
    channels: Annotated[int, Field(ge=1)] = 3
    """Channels of the input images."""
    zero_gamma: bool = True
    """ResNets: begin every residual block as the identity (last BatchNorm of a block scaled by zero)."""
    weight_standardisation: bool = False
    """Standardise the kernels of all convolutions while training; baked into the weights when a backbone is saved."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the library's constructor, for example {patch_size: 4}."""


class OptimizerConfig(Section):
    """How weights move."""

    name: Literal["lars", "sgd", "adamw"] = "lars"
    """LARS for large batches, SGD or AdamW otherwise."""
    lr: Annotated[float, Field(gt=0)] = 0.2
    """Base learning rate for 256 images; the peak rate is this times batch_size / 256, unless scale_lr is off."""
    scale_lr: bool = True
    """Scale the rate linearly with the global batch."""
    end_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The cosine ends at this share of the peak rate."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 10.0
    """Linear warm-up from zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 1.5e-6
    """Applied to weights with two or more dimensions; biases and normalisation are left out."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of LARS and SGD."""
    trust_coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """LARS: the length of a step relative to the weight's norm."""
    clip_trust: bool = False
    """LARS: the learning rate bounds the adapted rate of a weight instead of multiplying it, as in solo-learn."""
    nesterov: bool = False
    """Of SGD."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """Of AdamW."""
    one_dimensional_lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies the rate of biases and normalisation parameters (Barlow Twins: 0.024). Lower it if they blow up."""

    @model_validator(mode="after")
    def _consistent(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {list(self.betas)}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


Precision = Literal["auto", "fp32", "bf16", "fp64"]


Execution = Literal["auto", "eager", "compiled", "captured", "compiled and captured"]


class TrainingConfig(Section):
    """How long, in which portions, and how often to look."""

    epochs: Annotated[int, Field(ge=1)] = 100
    """Passes over the training images."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Images per step, over all processes together."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything random: weights, order, views."""
    precision: Precision = "auto"
    """auto: bf16 on GPUs that have it, else fp32."""
    execution: Execution = "auto"
    """How steps are carried out: one operation after the other (eager), through torch.compile (which takes a minute or
    two), or recorded as a CUDA graph and replayed. auto: captured on one GPU, else eager."""
    recompute: bool = False
    """Compute the activations of each block again for the backward pass instead of keeping them: the same step with
    less memory, about a quarter slower."""
    parts: Annotated[int, Field(ge=1)] = 1
    """Send the batch through the networks in so many parts, for even less memory. The loss and its covariance are those
    of the whole batch; BatchNorm sees parts, which changes the method."""
    clip_gradient: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the gradient, if it is to be clipped."""
    log_every_steps: Annotated[int, Field(ge=1)] = 50
    """Steps between two lines of metrics."""
    knn_every_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs between two kNN evaluations, if the data have labels; 0: never."""
    knn_images: Annotated[int, Field(ge=100)] = 10_000
    """Training images that this quick kNN compares with."""
    linear_probe: bool = False
    """Also fit a linear classifier to the same features whenever kNN is measured; training is not touched by it."""
    checkpoint_every_epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs between two checkpoints; the last epoch always writes one."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 30.0
    """And seconds, at least: where epochs are short, writing checkpoints would take longer than training."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that decode image files; by default one for each processor, 16 at most. Changes no result."""
