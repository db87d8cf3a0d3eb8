"""One file per protocol; the file name is the name on the command line.

A protocol has `Config`, a Section with its settings, and `run(context, config) -> Result`. Every number of a trained
backbone stands beside the same number of an untrained one (and of raw pixels, where images are small), so that "did
pretraining help?" is answered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tico_ssl import catalogue
from tico_ssl.data.source import Source
from tico_ssl.data.sources import Given, open_source, open_training, shown
from tico_ssl.device import choose_device
from tico_ssl.errors import UserError
from tico_ssl.features import data_config, extract, image_batches, needed_side, pixels
from tico_ssl.json_lines import append_json_line
from tico_ssl.networks.backbones import SMALL_IMAGE, Backbone, build_backbone
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.networks.storage import backbone_file, digest, load_backbone
from tico_ssl.randomness import derived_seed, generator
from tico_ssl.run_folder import Run, open_run
from tico_ssl.section import Section, validate

CALIBRATION_IMAGES = 2_560
HELD_OUT = 0.2  # of labelled images, where the data have no test split of their own

Numbers = dict[str, float]


@dataclass(frozen=True)
class Features:
    """What a frozen representation makes of the training and the test images.

    Labels are one class an image (N), or several (N, classes): 1 there, -1 not, 0 hard to say.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor | None = None
    test_labels: Tensor | None = None

    def labels(self, protocol: str) -> tuple[Tensor, Tensor]:
        """The class of every image, or a line that says what is missing."""
        train, test = self.raw_labels(protocol)
        if train.ndim != 1 or test.ndim != 1:
            raise UserError(f"{protocol} needs one class an image; these images have several")
        return train, test

    def raw_labels(self, protocol: str) -> tuple[Tensor, Tensor]:
        """The labels, be it one an image or several, or a line that says that there are none."""
        if self.train_labels is None or self.test_labels is None:
            raise UserError(f"{protocol} needs labels: class folders, or a data set that has them (see --data)")
        return self.train_labels, self.test_labels


def frozen_features(backbone: Backbone, train: Source, test: Source, device: torch.device) -> Features:
    """Both splits through a frozen backbone; images that cannot be read are left out with their labels."""
    ours, theirs = extract(backbone, train, device, label="features"), extract(backbone, test, device)
    return Features(
        ours.features,
        theirs.features,
        None if train.labels is None else train.labels[ours.places],
        None if test.labels is None else test.labels[theirs.places],
    )


@dataclass(frozen=True)
class Result:
    """One line of results.jsonl: numbers with everything that they depend on."""

    protocol: str
    settings: dict[str, Any]
    data: dict[str, Any]
    checkpoint: str
    seed: int
    numbers: dict[str, Numbers]
    seconds: float


@dataclass
class Context:
    """A trained backbone, an untrained twin, and data to judge them by. Features are extracted once."""

    backbones: dict[str, Backbone]
    train: Source
    test: Source
    data: dict[str, Any]
    checkpoint: str
    seed: int
    device: torch.device = field(default_factory=choose_device)

    @cached_property
    def representations(self) -> list[str]:
        """What is compared."""
        small = self.train.images is not None and max(self.train.images.shape[-2:]) <= SMALL_IMAGE
        return [*self.backbones, *(["pixels"] if small and self.test.images is not None else [])]

    def features(self, representation: str) -> Features:
        """Features of both splits under one representation."""
        if representation not in self._features:
            if representation == "pixels":
                features = Features(pixels(self.train), pixels(self.test), self.train.labels, self.test.labels)
            else:
                features = frozen_features(self.backbones[representation], self.train, self.test, self.device)
            self._features[representation] = features
        return self._features[representation]

    @cached_property
    def _features(self) -> dict[str, Features]:
        return {}

    def compare(self, protocol: str, config: Section, measure: Callable[[Features], Numbers]) -> Result:
        """The same measurement on every representation."""
        start = perf_counter()
        numbers = {name: measure(self.features(name)) for name in self.representations}
        seconds = round(perf_counter() - start, 2)
        settings = config.model_dump(mode="json")
        return Result(protocol, settings, self.data, self.checkpoint, self.seed, numbers, seconds)


def evaluate(
    run: str | Path, protocol: str, data: Given | None = None, overrides: Mapping[str, Any] | None = None
) -> Result:
    """Judge a run (or a backbone file) by a protocol; the result is also added to the run's results.jsonl."""
    return evaluate_with(open_context(run, data), run, protocol, overrides)


def evaluate_with(
    context: Context, run: str | Path, protocol: str, overrides: Mapping[str, Any] | None = None
) -> Result:
    """The same with a context at hand, so that several protocols share features."""
    module = catalogue.load("evaluations", protocol)
    config = validate(module.Config, dict(overrides or {}), f"evaluation {protocol}")
    result: Result = module.run(context, config)
    if (folder := Path(run).expanduser()).is_dir():
        append_json_line(Run(folder).results_file, asdict(result))
    return result


def open_context(run: str | Path, data: Given | None = None) -> Context:
    """Backbones and data of a run, ready for protocols."""
    file = backbone_file(run)
    trained = load_backbone(run)
    config = data_config(run, data)
    seed = open_run(run).recipe().training.seed if Path(run).expanduser().is_dir() else 0
    channels, shorter = trained.config.channels, needed_side(trained)
    train = open_training(config, channels, shorter)
    train, test, how = splits(train, open_source(config, "test", channels, shorter), seed)
    device = choose_device()
    backbones = {"trained": trained, "untrained": untrained_twin(trained, train, seed, device)}
    described = {"source": shown(config), "train": len(train), "test": len(test), "split": how}
    return Context(backbones, train, test, described, digest(file), seed, device)


def splits(train: Source, test: Source | None, seed: int) -> tuple[Source, Source, str]:
    """Images to learn from and to be asked about, and how they were chosen: the data's own, or within every class.

    Images of several classes, like those of none, are held out from the whole.
    """
    if test is not None:
        return train, test, "the data's own"
    order = torch.randperm(len(train), generator=generator(seed, "split"))
    held_out = torch.zeros(len(train), dtype=torch.bool)
    labels = train.labels
    if labels is None or labels.ndim != 1:
        labels = torch.zeros(len(train), dtype=torch.int64)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: max(1, round(HELD_OUT * len(members)))]] = True
    kept, out = (~held_out).nonzero().ravel(), held_out.nonzero().ravel()
    if len(kept) == 0:
        raise UserError(f"{train.name}: too few images to hold some out for a test")
    how = f"{HELD_OUT:.0%} held out by seed {seed}, seen without labels in pretraining"
    return train.subset(kept), train.subset(out), how


def untrained_twin(trained: Backbone, train: Source, seed: int, device: torch.device) -> Backbone:
    """The same architecture as it was before training, its BatchNorm calibrated on the data for a fair comparison."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        # Zero-gamma would make the twin shallower than a usual untrained network; it is the training's own device.
        config = trained.config.model_copy(update={"zero_gamma": False})
        twin = build_backbone(config, trained.image_size, trained.mean, trained.std).to(device)
    shuffled = train.subset(torch.randperm(len(train), generator=generator(seed, "split", 1))[:CALIBRATION_IMAGES])
    batches = (images for images, _ in image_batches(shuffled, twin, device))
    return calibrate(twin, batches)  # type: ignore[return-value]
