"""The sections of every recipe besides views and method: data, backbone, optimizer and training."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from tico_ssl.config.section import Section

FAR = 1e6  # bound of means, of deviations and of their inverses, with which normalised pixels are finite


def _as_deviations(given: tuple[float, ...]) -> tuple[float, ...]:
    if not all(1 / FAR <= value <= FAR for value in given):
        raise ValueError(f"must be positive numbers from {1 / FAR:g} to {FAR:g}")
    return given


Means = Annotated[tuple[Annotated[float, Field(ge=-FAR, le=FAR)], ...], Field(strict=False)]
Deviations = Annotated[tuple[float, ...], Field(strict=False), AfterValidator(_as_deviations)]
FOUND: Literal["percentile"] = "percentile"  # instead of a range of values: it is found in the images
MOST = 1e300  # of the values of an image
Limits = tuple[float, float] | tuple[tuple[float, float], ...]


def as_lists(limits: Any) -> Any:
    """Pairs as YAML and JSON have them."""
    return [as_lists(part) for part in limits] if isinstance(limits, tuple) else limits


def _as_range(given: Any) -> Any:
    """`percentile`, a pair of increasing numbers, or a pair per channel."""
    if given == FOUND:
        return given
    several = isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], list | tuple)
    pairs = given if several else [given]
    for pair in pairs:
        numbers = isinstance(pair, list | tuple) and len(pair) == 2
        if not numbers or not all(isinstance(value, int | float) and abs(value) < MOST for value in pair):
            raise ValueError("must be percentile, [low, high], or such a pair per channel")
        if not pair[0] < pair[1]:
            raise ValueError(f"must increase, but {pair[0]} is not less than {pair[1]}")
    found = tuple((float(low), float(high)) for low, high in pairs)
    return found if several else found[0]


Range = Annotated[Literal["percentile"] | Limits, PlainValidator(_as_range), PlainSerializer(as_lists)]


def limits_of(range: Literal["percentile"] | Limits) -> Limits | None:
    """The values that become 0 to 255; None if they are found in the images."""
    return None if isinstance(range, str) else range


class DataConfig(Section):
    """The training images, and how they are loaded and normalised."""

    source: str | list[str] = "textures"
    """A folder of images (with or without class folders, with or without train/ and test/; ImageNet, Tiny-ImageNet,
    Places-205, iNaturalist 2018 and VOC2007 as distributed), a list of folders, a text file of paths, a packed, .npz,
    .npy, .tar or .parquet file, or a name: textures, cifar10, cifar100, stl10, ... A prefix `FORMAT:` selects the
    format, also from a module of your own: my_lab.formats.raw:scans/. Empty: given by --data."""
    root: str = "data"
    """Folder of data sets that are given by name."""
    download: bool = False
    """Download a data set that is given by name if it is missing."""
    image_size: Annotated[int, Field(ge=8)] = 32
    """Side of the network's square input, in pixels."""
    reduced_decoding: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, as long as even the smallest crop has at least the view's
    resolution."""
    most_bad: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Fraction of unreadable files above which a run refuses to start."""
    store: Literal["auto", "disk", "memory", "none"] = "auto"
    """Files: decode each image once and keep its pixels, in the cache folder (disk), where later commands and other
    runs find them (see `tico cache`), or in memory; what does not fit is decoded every time. auto: on disk if there is
    room for all images, else in memory if they take less than half of what is free, else not at all. none: decode them
    in every epoch. Does not affect results."""
    decoder: Literal["cpu", "gpu"] = "cpu"
    """gpu: JPEGs are decoded by the GPU (nvJPEG), which leaves the CPU's cores free: for files that are too many to be
    decoded once, or a machine with few cores. Its pixels differ from the CPU's by a few levels, so a run keeps its
    decoder. Evaluations decode on the CPU. Needs a CUDA GPU and three channels."""
    on_gpu: bool = True
    """Keep images on the GPU if they take less than two fifths of its free memory."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Train on this number of images, spread over the data set (textures: generate this number); default: all."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training images, of every class, that a run does not see and is evaluated by instead of the test
    images: to choose settings without looking at these. The same images for every seed."""
    tiles: Annotated[int, Field(ge=16)] | None = None
    """Read images that are larger than this number of pixels along a side as square tiles of that side; default: images
    are whole, and refused above 134 million pixels."""
    tile_contrast: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leave out the tiles of an image whose values have less than this fraction of the standard deviation of all its
    values: background. Above 0, every tile is read when the images are opened."""
    range: Range = FOUND
    """Values that become 0 to 255, where images have more than eight bits: [low, high], or a list of such pairs, one
    per channel. percentile: the percentiles 0.5 and 99.5 of 256 training images, unless DICOM files have windows; the
    run keeps what was found. Images of eight bits are used as they are."""
    mean: Means = (0.485, 0.456, 0.406)
    """Mean per channel, subtracted; default: ImageNet's. Empty, or three values for another number of channels: that of
    256 training images, which the run keeps."""
    std: Deviations = (0.229, 0.224, 0.225)
    """Standard deviation per channel, divided by; default and choice as for the mean."""

    @field_validator("source")
    @classmethod
    def _named(cls, source: str | list[str]) -> str | list[str]:
        for place in [source] if isinstance(source, str) else source or [""]:
            if "\0" in place or (not place and source != ""):
                raise ValueError("must be the name of a place, or several of them")
        return source


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


BACKBONE_LIBRARIES = ("torchvision", "timm", "tico")


class BackboneConfig(Section):
    """The network that is trained and saved."""

    name: str = "torchvision/resnet50"
    """library/model: torchvision/..., timm/..., or tico/resnet18-w16 (any width)."""
    stem: Literal["auto", "standard", "small"] = "auto"
    """ResNets: 'small' is a 3x3 convolution without max-pool, for finer features and up to 16 times the arithmetic;
    'auto' uses it for images up to 48 pixels."""
    stem_padding: Literal[1, 2] = 1
    """ResNets: padding of the small stem. 2 is solo-learn's: feature maps of 34 pixels from images of 32."""
    channels: Annotated[int, Field(ge=1)] = 3
    """Channels of the input images."""
    zero_gamma: bool = True
    """ResNets: initialise every residual block as the identity (zero weight in its last BatchNorm)."""
    weight_standardisation: bool = False
    """Weight standardisation of all convolutions during training; folded into the weights of the saved backbone."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the library's constructor, for example {patch_size: 4}."""


class OptimizerConfig(Section):
    """Optimiser and learning rate schedule."""

    name: Literal["lars", "sgd", "adamw"] = "lars"
    """LARS (for large batches), SGD or AdamW."""
    lr: Annotated[float, Field(gt=0, le=1e30)] = 0.2
    """Base learning rate for a batch of 256; the peak rate is lr * batch_size / 256, unless scale_lr is off."""
    scale_lr: bool = True
    """Scale the learning rate linearly with the global batch size."""
    warmup_epochs: Annotated[float, Field(ge=0, le=1e9)] = 10.0
    """Epochs of linear warm-up."""
    start_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Initial learning rate of the warm-up, as a fraction of the peak."""
    schedule: Literal["cosine", "steps"] = "cosine"
    """Decay of the learning rate after the warm-up: cosine or steps."""
    end_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """schedule=cosine: final learning rate, as a fraction of the peak."""
    decay_at: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False)] = (0.6, 0.8)
    """schedule=steps: fractions of the training after which the learning rate falls (epochs 120 and 160 of 200), so
    that a run of another length has the same shape. Empty: a constant rate."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """schedule=steps: factor of each fall."""
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = 1.5e-6
    """Applied to weights with two or more dimensions."""
    scale_decay: bool = False
    """Divide the weight decay by what scale_lr multiplies the learning rate by: rate x decay, which decides by what
    angle a step turns weights in front of normalisation, is the same for all batches."""
    decay_all: bool = False
    """Weight decay of biases and normalisation parameters too."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of LARS and SGD."""
    trust_coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """LARS: norm of an update relative to the norm of the weight."""
    clip_trust: bool = False
    """LARS: the learning rate is the upper bound of the adapted rate instead of its factor (LARC, solo-learn)."""
    separate_norms: bool = False
    """LARS: the trust ratio is |p| / (|g| + weight_decay |p|) instead of |p| / |g + weight_decay p| (LARC,
    solo-learn)."""
    adapt_all: bool = False
    """LARS: adapt the rate of biases and normalisation parameters too (SwAV)."""
    nesterov: bool = False
    """SGD: Nesterov momentum."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """AdamW: decay rates of the first and second moments."""
    one_dimensional_lr_ratio: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Learning rate factor of biases and normalisation parameters (Barlow Twins: 0.024). Lower it if they diverge."""

    @model_validator(mode="after")
    def _consistent(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {list(self.betas)}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


Precision = Literal["auto", "fp32", "bf16", "fp64"]


Execution = Literal["auto", "eager", "compiled", "captured", "compiled and captured"]


LoggerName = Literal["tensorboard", "wandb", "mlflow"]


class TrainingConfig(Section):
    """Length, batch size, execution and logging."""

    epochs: Annotated[int, Field(ge=1, le=10**9)] = 100
    """Passes over the training images."""
    batch_size: Annotated[int, Field(ge=2)] = 256
    """Global batch size: images per step over all processes."""
    least_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a run on few images: if epochs would make fewer, batches are halved (down to 32 images) until an epoch
    has four steps, and epochs, warm-up and the interval of kNN grow. If epochs or batch_size are given, the default is
    0: nothing is adapted."""
    init: str | None = None
    """Weights that the backbone starts from: the public ones of a model (torchvision/resnet50), a checkpoint of another
    program, a run or a backbone file. Default: random."""
    init_strict: bool = True
    """Refuse initial weights that do not match the whole backbone; else what does not match starts at random."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed of weights, image order and views."""
    precision: Precision = "auto"
    """auto: bf16 on GPUs (Ampere or later) and CPUs (AVX512-BF16 or AMX) that multiply it faster, else fp32."""
    execution: Execution = "auto"
    """eager, compiled (torch.compile, which takes a minute or two), or captured as a CUDA graph. auto: captured on
    GPUs, else eager."""
    sharded: bool = False
    """Several processes: each keeps a share of weights, gradients, optimiser state and target, which saves memory in
    large vision transformers (FSDP2). Steps are eager; needs adamw or sgd."""
    recompute: bool = False
    """Activation checkpointing: recompute each block in the backward pass. Same result, less memory, about a quarter
    slower."""
    parts: Annotated[int, Field(ge=1)] = 1
    """Number of parts in which the batch goes through the networks, to save more memory. Loss and covariance are those
    of the whole batch; BatchNorm statistics are those of the parts, which changes the method."""
    clip_gradient: Annotated[float, Field(gt=0)] | None = None
    """Maximum gradient norm; default: no clipping."""
    log_every_steps: Annotated[int, Field(ge=1)] = 50
    """Steps between logged metrics."""
    loggers: Annotated[tuple[LoggerName, ...], Field(strict=False)] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, several of them or none ([]). If one fails,
    training goes on without it. Does not affect results."""
    knn_every_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs between online kNN evaluations, if the data have labels; 0: never."""
    knn_images: Annotated[int, Field(ge=100)] = 10_000
    """Number of training images in the online kNN."""
    linear_probe: bool = False
    """Also fit a linear classifier to the features of each online kNN. Does not affect training."""
    checkpoint_every_epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs between checkpoints; the last epoch always writes one."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Minimum seconds between checkpoints, so that short epochs are not dominated by writing them."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept: the newest, and earlier ones in case it gets damaged."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that decode image files; default: one per CPU core, at most 16. Does not affect results."""
