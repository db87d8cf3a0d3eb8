"""Linear evaluation as BYOL and TiCo report it: a classifier on the frozen backbone, trained on random crops.

Several learning rates are trained side by side on the same features. The one that is best on held-out training images
is reported; with one rate no image is held out.
"""

import copy
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.config.views import shorter_side
from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.settings import Positive, Rate, Settings
from tico_ssl.evaluations._classification.training import Job, classes_of, train_classifier
from tico_ssl.evaluations._context import Context
from tico_ssl.features.scores import top_accuracies
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.randomness import generator


class Config(Settings):
    """The paper's settings for ImageNet."""

    batch_size: Annotated[int, Field(ge=2)] = 1024
    """Images a step, over all processes; all of them, if there are fewer."""
    lrs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (0.4,)
    """Learning rates for this batch size. BYOL tries 0.4, 0.3, 0.2, 0.1 and 0.05."""
    held_out: Positive = 10_009
    """Training images that choose among several rates; at most a tenth of all."""
    batch_norm: bool = False
    """Normalise each feature by the batch before the classifier, with rates to match (0.01)."""


def run(context: Context, config: Config) -> Result:
    """Accuracy of the classifier on the test images, in per cent."""
    return evaluate_frozen(context, config, "linear-augmented")


def evaluate_frozen(context: Context, config: Config, protocol: str) -> Result:
    """The same under another name, for protocols that differ in their settings alone."""
    begun = perf_counter()
    context.labels(protocol)
    numbers = {}
    for name in context.backbones:
        make = partial(_measure, context, config, name, f"{protocol} {name}")
        numbers[name] = context.part(protocol, config, name, make)
    return context.result(protocol, config, numbers, perf_counter() - begun)


def _measure(context: Context, config: Config, name: str, title: str, place: Path | None) -> Numbers:
    backbone = context.backbones[name]
    images = context.training_images(shorter_side([config.policy()], backbone.image_size))
    kept, out = _held_out(len(images), config)
    job = Job(
        title,
        images if len(out) == 0 else images.subset(kept),
        classes_of(context.train, context.test),
        config,
        context.device,
        None if place is None else place.with_name(f"{name}.pt"),
    )
    classifier = train_classifier(job, copy.deepcopy(backbone), config.lrs, None, config.batch_norm)

    def accuracies(source: Source) -> list[Numbers]:
        """Of every head, on centre crops."""
        features, places = context.cache.extract(backbone, source, context.device)
        assert source.labels is not None
        labels = source.labels[places]
        return [top_accuracies(scores, labels) for scores in classifier.scores(features)]

    best = 0
    if len(out):
        chosen = [numbers["top1"] for numbers in accuracies(context.train.subset(out))]
        best = chosen.index(max(chosen))
    return accuracies(context.test)[best] | {"lr": config.lrs[best]}


def _held_out(count: int, config: Config) -> tuple[Tensor, Tensor]:
    """Places to learn from, and places that choose the rate where there is a choice."""
    number = min(config.held_out, max(1, count // 10)) if len(config.lrs) > 1 else 0
    order = torch.randperm(count, generator=generator(config.seed, "probe", 2))
    return order[number:].sort().values, order[:number].sort().values
