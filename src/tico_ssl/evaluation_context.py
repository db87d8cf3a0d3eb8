"""What every protocol gets: backbones, images to judge them by, features extracted once; and the form of a result."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tico_ssl import distributed
from tico_ssl.atomic import write_atomically
from tico_ssl.data.source import Source
from tico_ssl.data.sources import Given, open_source, open_training, shown
from tico_ssl.device import choose_device
from tico_ssl.errors import UserError
from tico_ssl.feature_cache import FeatureCache, images_digest
from tico_ssl.features import image_batches, needed_side, pixels
from tico_ssl.networks.backbones import SMALL_IMAGE, Backbone, build_backbone
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.progress import say
from tico_ssl.randomness import derived_seed, generator
from tico_ssl.section import Section
from tico_ssl.subjects import open_subject

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


def frozen_features(
    backbone: Backbone,
    train: Source,
    test: Source,
    device: torch.device,
    cache: FeatureCache | None = None,
    whole: bool = False,
) -> Features:
    """Both splits through a frozen backbone; images that cannot be read are left out with their labels."""
    cache = cache or FeatureCache(None)
    ours = cache.extract(backbone, train, device, "features", whole)
    theirs = cache.extract(backbone, test, device, None, whole)
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
    """A trained backbone, an untrained twin, and data to judge them by. Features are extracted once.

    `cache` keeps features and `home` the state of long protocols from one command to the next, where there are such.
    """

    backbones: dict[str, Backbone]
    train: Source
    test: Source
    data: dict[str, Any]
    checkpoint: str
    seed: int
    device: torch.device = field(default_factory=choose_device)
    cache: FeatureCache = field(default_factory=lambda: FeatureCache(None))
    home: Path | None = None
    reopen: Callable[[int], Source] | None = None
    """The training images again, large JPEGs reduced only as far as the shorter side keeps so many pixels."""
    run: Path | None = None
    """The folder of the run that the backbone comes from, if it does: its recipe has views and a projector."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What one protocol has made and another may use, such as features of augmented views."""

    @cached_property
    def representations(self) -> list[str]:
        """What is compared."""
        small = self.train.images is not None and max(self.train.images.shape[-2:]) <= SMALL_IMAGE
        return [*self.backbones, *(["pixels"] if small and self.test.images is not None else [])]

    def labels(self, protocol: str) -> tuple[Tensor, Tensor]:
        """The class of every training and test image, or a line that says what is missing, before any work is done."""
        empty = torch.empty(0)
        return Features(empty, empty, self.train.labels, self.test.labels).labels(protocol)

    def features(self, representation: str, whole: bool = False) -> Features:
        """Features of both splits under one representation: of central squares, or of whole images pressed into one."""
        key = (representation, whole and not self._square)
        if key not in self._features:
            if representation == "pixels":
                features = Features(pixels(self.train), pixels(self.test), self.train.labels, self.test.labels)
            else:
                backbone = self.backbones[representation]
                features = frozen_features(backbone, self.train, self.test, self.device, self.cache, key[1])
            self._features[key] = features
        return self._features[key]

    @cached_property
    def _square(self) -> bool:
        """Whether all images are as the network takes them, so that their centre is the whole."""
        side = next(iter(self.backbones.values())).image_size
        return all(s.images is not None and s.images.shape[-2:] == (side, side) for s in (self.train, self.test))

    @cached_property
    def _features(self) -> dict[tuple[str, bool], Features]:
        return {}

    def training_images(self, shorter: int) -> Source:
        """For crops: images of one size are as they are, files are decoded so that their shorter side suffices."""
        return self.train if self.train.images is not None or self.reopen is None else self.reopen(shorter)

    def compare(
        self,
        protocol: str,
        config: Section,
        measure: Callable[[Features], Numbers],
        representations: Sequence[str] | None = None,
    ) -> Result:
        """The same measurement on every representation."""
        start = perf_counter()
        names = self.representations if representations is None else representations
        numbers = {name: measure(self.features(name)) for name in names}
        return self.result(protocol, config, numbers, perf_counter() - start)

    def result(
        self, protocol: str, config: Section, numbers: dict[str, Numbers], seconds: float, **about_data: Any
    ) -> Result:
        """A result with everything that it depends on."""
        settings, data = config.model_dump(mode="json"), self.data | about_data
        return Result(protocol, settings, data, self.checkpoint, self.seed, numbers, round(seconds, 2))

    def part(self, protocol: str, config: Section, name: str, make: Callable[[Path | None], Numbers]) -> Numbers:
        """The numbers of a part of a long protocol. One that has been finished is not made again; `make` gets a place,
        without a suffix, for a checkpoint of one that has not."""
        if self.home is None:
            return make(None)
        decisive = [config.model_dump(mode="json"), self.data, self.checkpoint, self.seed, self._images]
        short = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]
        place = self.home / "evaluations" / f"{protocol}-{short}" / name
        finished = place.with_name(f"{name}.json")
        if finished.is_file():
            say(f"{protocol} {name}: already made, {finished}")
            kept: Numbers = json.loads(finished.read_text(encoding="utf-8"))
            return kept
        numbers = make(place)
        if distributed.is_main():
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(finished, json.dumps(numbers) + "\n")
            for suffix in (".pt", ".jsonl"):  # what it would have gone on with
                place.with_name(name + suffix).unlink(missing_ok=True)
        return numbers

    @cached_property
    def _images(self) -> list[str | None]:
        return [images_digest(source, self.cache.places) for source in (self.train, self.test)]


def open_context(run: str | Path, data: Given | None = None, cache: bool = False) -> Context:
    """Backbones and data of a run, a file or a model by name, ready for protocols. With `cache`, features and the state
    of long protocols are kept in the run's folder."""
    subject = open_subject(run, data)
    backbone, config, seed, device = subject.backbone, subject.data, subject.seed, choose_device()
    channels, shorter = backbone.config.channels, needed_side(backbone)
    test = open_source(config, "test", channels, shorter)

    def training(shorter: int) -> tuple[Source, Source, str]:
        return splits(open_training(config, channels, shorter), test, seed)

    train, test_images, how = training(shorter)
    twin = untrained_twin(backbone, train, seed, device)
    backbones = {"trained": backbone, "untrained": twin} if subject.trained else {"untrained": twin}
    described = {"source": shown(config), "train": len(train), "test": len(test_images), "split": how}
    places = (config.source,) if isinstance(config.source, str) else tuple(config.source)
    return Context(
        backbones,
        train,
        test_images,
        described,
        subject.checkpoint,
        seed,
        device,
        FeatureCache(subject.home / "features" if cache else None, places, config.reduced_decoding),
        subject.home if cache else None,
        lambda shorter: training(shorter)[0],
        subject.home if Path(run).expanduser().is_dir() else None,
    )


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
    twin = fresh_twin(trained, seed).to(device)
    shuffled = train.subset(torch.randperm(len(train), generator=generator(seed, "split", 1))[:CALIBRATION_IMAGES])
    batches = (images for images, _ in image_batches(shuffled, twin, device))
    return calibrate(twin, batches)  # type: ignore[return-value]


def fresh_twin(trained: Backbone, seed: int) -> Backbone:
    """The same architecture with the weights that it has before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        # Zero-gamma would make the twin shallower than a usual untrained network; it is the training's own device.
        config = trained.config.model_copy(update={"zero_gamma": False})
        return build_backbone(config, trained.image_size, trained.mean, trained.std)
