"""The context of every protocol: backbones, data, features extracted once, and how a result is made."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.config.views import SMALL_IMAGE
from tico_ssl.data.fingerprint import require_same_everywhere
from tico_ssl.data.given import Given
from tico_ssl.data.source import Source, digest_of_numbers, joint_digest
from tico_ssl.data.sources import required, shown
from tico_ssl.data.stored import open_stored
from tico_ssl.evaluations._unread import Unread
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.evidence import accuracies as accuracies  # for protocols elsewhere
from tico_ssl.features.evidence import as_line, from_line, intervals_of
from tico_ssl.features.extraction import needed_side, pixels
from tico_ssl.features.frozen import Features, frozen_features
from tico_ssl.features.homes import INITIAL, PIXELS, TRAINED, UNTRAINED
from tico_ssl.features.lazy import LazyBackbone, LazyBackbones, ready
from tico_ssl.features.splits import Splits, splits
from tico_ssl.features.subjects import Subject, open_others, open_subject, untrained_twin
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.record import SEEN, Numbers, Result
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import choose_device
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.files import remove_temporaries
from tico_ssl.runtime.json_lines import read_json_lines, sealed, unsealed, write_json_lines
from tico_ssl.runtime.locks import alone_in
from tico_ssl.runtime.progress import say
from tico_ssl.views.centre import smaller_than_needed


@dataclass
class Context:
    """A trained backbone, an untrained twin, models to compare with, and data to evaluate them on. Features are
    extracted once.

    `cache` keeps features, and `home` the state of long protocols, between commands; both are optional.
    """

    backbones: LazyBackbones
    train: Source
    test: Source
    data: dict[str, Any]
    checkpoint: str
    seed: int
    device: torch.device = field(default_factory=choose_device)
    cache: FeatureCache = field(default_factory=lambda: FeatureCache(None))
    home: Path | None = None
    reopen: Callable[[int], tuple[Source, Source]] | None = None
    """Both splits again, with large JPEGs reduced in decoding only down to this shorter side."""
    run: Path | None = None
    """The run folder of the backbone, if it has one: its recipe defines views and a projector."""
    protocol: str = "this protocol"
    """The protocol's name: that of the catalogue, or a dotted path."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """Intermediate results that protocols share, such as features of augmented views."""
    others: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the further columns are: the folder or file of each model, and its checkpoint."""
    unread: Unread = field(default_factory=Unread)
    """Images that protocols left out, since they cannot be read."""

    @cached_property
    def representations(self) -> list[str]:
        """The representations under comparison: raw pixels, too, of small images that all have one size."""
        train, test = self.train.images, self.test.images
        alike = train is not None and test is not None and train.shape[1:] == test.shape[1:]
        small = train is not None and max(train.shape[-2:]) <= SMALL_IMAGE
        return [*self.backbones, *([PIXELS] if alike and small else [])]

    def labels(self, several: bool = False) -> tuple[Tensor, Tensor]:
        """The class of every training and test image; a UserError where there is none, before any work is done. With
        `several`, an image may have several classes."""
        empty = torch.empty(0)
        features = Features(empty, empty, self.train.labels, self.test.labels)
        return features.raw_labels(self.protocol) if several else features.labels(self.protocol)

    @property
    def exact_cache(self) -> FeatureCache:
        """The cache of features that are float32 in any case, for protocols that prepare images otherwise, too."""
        return replace(self.cache, dtype=torch.float32)

    def features(self, representation: str, whole: bool = False, exact: bool = False) -> Features:
        """Features of both splits under one representation: of central crops, or of whole images (squash resize);
        `exact`: in float32, even if others are in bf16."""
        whole = whole and representation != PIXELS and not self._square(representation)
        key = (representation, whole, self.exact_cache if exact else self.cache)
        if key not in self._features:
            if representation == PIXELS:
                features = Features(pixels(self.train), pixels(self.test), self.train.labels, self.test.labels)
                self._features[key] = features
            else:
                self._extract(representation, whole, key[2])
        return self._features[key]

    def _extract(self, representation: str, whole: bool, cache: FeatureCache) -> None:
        """Features under a backbone and all with the same input, in one pass over the images."""
        names = next(names for names in self.alike if representation in names)
        unbuilt = [self.backbones.lazy[name] for name in names]
        images = self.images(representation)
        made = frozen_features(unbuilt, *images, self.device, cache, whole, note=self.unread.note)
        self._features.update({(name, whole, cache): one for name, one in zip(names, made, strict=True)})

    @cached_property
    def alike(self) -> list[list[str]]:
        """Names of the backbones; those that see the same pixels are together."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name, lazy in self.backbones.lazy.items():
            found.setdefault((lazy.like.image_size, lazy.like.mean, lazy.like.std), []).append(name)
        return list(found.values())

    def images(self, name: str) -> tuple[Source, Source]:
        """Training and test images as a backbone needs them: large JPEGs at the resolution of its input."""
        return self.images_for(self.backbones.lazy[name].like)

    def images_for(self, backbone: Backbone) -> tuple[Source, Source]:
        """The same for a backbone that may be none of these."""
        first, shorter = next(iter(self.backbones.lazy.values())).like, needed_side(backbone)
        arrays = self.train.images is not None and self.test.images is not None
        if arrays or self.reopen is None or shorter == needed_side(first):
            return self.train, self.test
        if shorter not in self._reopened:
            self._reopened[shorter] = self.reopen(shorter)
        return self._reopened[shorter]

    @cached_property
    def _reopened(self) -> dict[int, tuple[Source, Source]]:
        return {}

    @property
    def image_size(self) -> int:
        """Side in pixels of the input of the backbone under evaluation."""
        return next(iter(self.backbones.lazy.values())).like.image_size

    def _square(self, name: str) -> bool:
        """Whether all images have a network's input size, so that the central crop is the whole image."""
        side = self.backbones.lazy[name].like.image_size
        return all(s.images is not None and s.images.shape[-2:] == (side, side) for s in (self.train, self.test))

    @cached_property
    def _features(self) -> dict[tuple[str, bool, FeatureCache], Features]:
        return {}

    def training_images(self, shorter: int) -> Source:
        """For random crops: arrays as they are, files decoded at a sufficient shorter side."""
        return self.train if self.train.images is not None or self.reopen is None else self.reopen(shorter)[0]

    def compare(
        self, config: Section, measure: Callable[[Features], Numbers], representations: Sequence[str] | None = None
    ) -> Result:
        """The same metrics for every representation."""
        start = perf_counter()
        names = self.representations if representations is None else representations
        numbers = {name: measure(self.features(name)) for name in names}
        return self.result(config, numbers, perf_counter() - start)

    def result(self, config: Section, numbers: dict[str, Numbers], seconds: float, **about_data: Any) -> Result:
        """A result with everything that it depends on, and the intervals of numbers that are `Scores`."""
        self.unread.share()
        unread = {"unread": self.unread.counts} if self.unread.counts else {}
        settings, data = config.model_dump(mode="json"), self.data_of_results | unread | about_data
        intervals, differences = intervals_of(numbers)
        plain = {name: dict(found) for name, found in numbers.items()}
        made = Result(self.protocol, settings, data, self.checkpoint, self.seed, plain, round(seconds, 2))
        return replace(made, intervals=intervals, differences=differences)

    @property
    def data_of_results(self) -> dict[str, Any]:
        """The data, and the models to compare with, as results describe them."""
        return self.data | ({"against": self.others} if self.others else {})

    def part(
        self,
        config: Section,
        name: str,
        make: Callable[[Path | None], Numbers],
        column: str | None = None,
        places: Tensor | None = None,
    ) -> Numbers:
        """The metrics of a part of a long protocol, computed once. `make` gets a path, without suffix, for its
        checkpoint. `column` is that of the part, if it is not its name, and `places` are the training images that it
        is given, if not all. Without a digest of the data, nothing is kept."""
        if self.home is None or self.digest is None:
            return make(None)
        column = column or name
        weights = self.backbones.lazy[column].identity if column in self.others else self.checkpoint
        trained_on = None if places is None else digest_of_numbers(places)
        decisive = [config.model_dump(mode="json"), self.data, weights, self.seed, self.digest, trained_on]
        short = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]
        place = self.home / "evaluations" / f"{self.protocol}-{short}" / name
        finished = place.with_name(f"{name}.json")
        if (kept := self._finished(finished)) is not None:
            say(f"{self.protocol} {name}: already done, {finished}")
            if distributed.is_main():
                _remove_checkpoint(place)  # of a command that was killed before it did
            return kept
        with self._alone(place.parent):
            remove_temporaries(place)
            numbers = make(place)
            self.unread.share()
            if distributed.is_main():
                self._keep(numbers, place, finished)
        return numbers

    def _keep(self, numbers: Numbers, place: Path, finished: Path) -> None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json_lines(finished, [sealed({"result": as_line(numbers), "unread": self.unread.reasons})])
            _remove_checkpoint(place)
        except OSError as error:  # which costs time later, not the result
            say(f"{self.protocol} {place.name} is not kept: {refusal(error)}")

    def _finished(self, file: Path) -> Numbers | None:
        """The metrics in a file, or None if there are none, or damaged ones."""
        if not file.is_file():
            return None
        lines = [unsealed(line) for line in read_json_lines(file)]
        if len(lines) != 1 or lines[0] is None:
            say(f"{file}: damaged, so it is computed again")
            return None
        self.unread.add(lines[0]["unread"])
        return from_line(lines[0]["result"])

    def _alone(self, folder: Path) -> AbstractContextManager[object]:
        """Keep other commands from the state of this protocol."""
        if not distributed.is_main():
            return nullcontext()
        return alone_in(folder, f"another command evaluates {self.protocol} in {folder}: wait for its end")

    @cached_property
    def digest(self) -> str | None:
        """A digest of the images and labels of both splits, by which results are known, and the state of protocols that
        take long. None if they have no identity."""
        return joint_digest([self.train.labelled_fingerprint(), self.test.labelled_fingerprint()])


def _remove_checkpoint(place: Path) -> None:
    """The checkpoint of a finished part is of no use."""
    for suffix in (".pt", ".jsonl"):
        with suppress(OSError):
            place.with_name(place.name + suffix).unlink(missing_ok=True)


def open_context(
    run: str | Path,
    data: Given | None = None,
    cache: bool = False,
    bf16: bool = False,
    against: Sequence[str | Path] = (),
) -> Context:
    """Open the backbones and data of a run, a backbone file or a model by name. With `cache`, features and the state of
    long protocols are kept in the run's folder. With `bf16`, frozen features are computed in bf16. `against` are models
    to compare with, on the same images."""
    subject = open_subject(run, data)
    backbone, config, seed, device = subject.backbone, subject.data, subject.seed, choose_device()

    def opened(shorter: int) -> Splits:
        channels = backbone.config.channels
        train = required(open_stored(config, "train", channels, shorter), config)
        return splits(train, open_stored(config, "test", channels, shorter), seed, config.held_out)

    train, test, how, drawn = opened(needed_side(backbone))
    require_same_everywhere([train, test])
    if (smaller := smaller_than_needed(test.reduced, backbone.image_size)) is not None:
        say(f"{shown(config)}: {smaller}")
    twin = untrained_twin(backbone, train, seed, device, config.reduced_decoding)
    dtype = torch.bfloat16 if bf16 else torch.float32
    described = {"source": shown(config), "train": len(train), "test": len(test), "split": how}
    described |= {SEEN: True} if drawn and subject.has_seen_its_data else {}
    described |= {"precision": "bf16"} if bf16 else {}
    described |= {} if smaller is None or test.reduced is None else {"packed": list(test.reduced)}
    context = Context(
        LazyBackbones({TRAINED: backbone, UNTRAINED: twin} if subject.trained else {UNTRAINED: twin}),
        train,
        test,
        described,
        subject.checkpoint,
        seed,
        device,
        FeatureCache(subject.home / "features" if cache else None, config.reduced_decoding, dtype, together=True),
        subject.home if cache else None,
        lambda shorter: opened(shorter)[:2],
        subject.home if Path(run).expanduser().is_dir() else None,
    )
    _put_beside(context, open_others(run, against, subject))
    return context


def _put_beside(context: Context, others: Mapping[str, Subject]) -> None:
    """Add models to compare with. The order of the columns is that of the table."""
    columns: dict[str, Backbone | LazyBackbone] = {**context.backbones.lazy}
    for name, other in others.items():
        folder = None if name == INITIAL else other.home / "features"
        if other.trained:
            columns[name] = ready(other.backbone, folder)
        else:
            train, _ = context.images_for(other.backbone)
            twin = untrained_twin(other.backbone, train, other.seed, context.device, context.cache.reduced_decoding)
            columns[name] = replace(twin, folder=folder)
        context.others[name] = other.described
    order = [name for name in dict.fromkeys((TRAINED, INITIAL, UNTRAINED, *columns)) if name in columns]
    context.backbones = LazyBackbones({name: columns[name] for name in order})
