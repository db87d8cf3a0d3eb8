"""Linear evaluation as BYOL and TiCo report it: a classifier on the frozen backbone, trained on random crops.

Several learning rates are trained side by side on the same features. The best on held-out training images is reported;
with a single learning rate, no image is held out.
"""

import copy
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from tico_ssl.config.views import shorter_side
from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.settings import LinearSettings as Config
from tico_ssl.evaluations._classification.training import Job, classes_of, train_classifier
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._estimate import Work
from tico_ssl.features.scores import top_accuracies
from tico_ssl.results.metrics import TOP1, TOP5, Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.randomness import generator

COST = "head"
METRICS = (TOP1, TOP5, Metric("lr", shown=False))


def work(context: Context, config: Config) -> Work:
    """Images pass through each frozen backbone; what the classifier adds is little."""
    context.labels()
    kept = len(context.train) - _number_held_out(len(context.train), config)
    return Work(frozen=config.images_seen(kept)).times(len(context.backbones))


def run(context: Context, config: Config) -> Result:
    """Accuracy of the classifier on the test images, in per cent."""
    begun = perf_counter()
    context.labels()
    numbers = {}
    for name in context.backbones:
        make = partial(_measure, context, config, name, f"{context.protocol} {name}")
        numbers[name] = context.part(config, name, make)
    return context.result(config, numbers, perf_counter() - begun)


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
        bad=context.unread.train,
    )
    classifier = train_classifier(job, copy.deepcopy(backbone), config.lrs, None, config.batch_norm)

    def accuracies(split: str, source: Source) -> list[Numbers]:
        """Accuracy of every head, on central crops."""
        features, places = context.exact_cache.extract(context.backbones.lazy[name], source, context.device)
        context.unread.note(split, source, places)
        assert source.labels is not None
        labels = source.labels[places]
        return [top_accuracies(scores, labels) for scores in classifier.scores(features)]

    best = 0
    train, test = context.images(name)
    if len(out):
        chosen = [numbers["top1"] for numbers in accuracies("train", train.subset(out))]
        best = chosen.index(max(chosen))
    return accuracies("test", test)[best] | {"lr": config.lrs[best]}


def _held_out(count: int, config: Config) -> tuple[Tensor, Tensor]:
    """Indices of the images to train on, and of those that choose the learning rate if there are several."""
    number = _number_held_out(count, config)
    order = torch.randperm(count, generator=generator(config.seed, "probe", 2))
    return order[number:].sort().values, order[:number].sort().values


def _number_held_out(count: int, config: Config) -> int:
    return min(config.held_out, max(1, count // 10)) if len(config.lrs) > 1 else 0
