"""Few-shot: logistic regression on frozen features of one, five and ten labelled images of every class.

Features have length one and the regression has C = 1, as in Tian et al. (2020). Mean and deviation over several draws.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from tico_ssl.config.section import Section
from tico_ssl.evaluations._classification.settings import Positive
from tico_ssl.evaluations._classification.subsets import number_of_each
from tico_ssl.evaluations._context import Context
from tico_ssl.features.frozen import Features
from tico_ssl.features.regression import fit_linear
from tico_ssl.features.scores import top_accuracies
from tico_ssl.results.metrics import TOP1
from tico_ssl.results.record import Numbers, Result
from tico_ssl.results.statistics import mean_and_deviation
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say

METRICS = (TOP1,)


class Config(Section):
    """How many images, how often."""

    shots: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1, 5, 10)
    """Labelled images of every class."""
    draws: Positive = 5
    """Choices of those images; no two have one in common as long as a class has enough."""
    cost: Annotated[float, Field(gt=0)] = 1.0
    """C of the regression: what the error of one image costs, against half the squared weights."""
    iterations: Positive = 100
    """Of L-BFGS."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the draws."""


def run(context: Context, config: Config) -> Result:
    """Accuracy on all test images, in per cent."""
    labels, _ = context.labels()
    fewest = int(labels.unique(return_counts=True)[1].min())
    shots = [number for number in config.shots if number <= fewest]
    if not shots:
        raise UserError(
            f"{context.protocol} needs {min(config.shots)} images of every class, one has {fewest}: lower shots"
        )
    if too_many := [number for number in config.shots if number > fewest]:
        left_out = ", ".join(map(str, too_many))
        say(f"{context.protocol} without {left_out} a class: one class has {fewest} training images")
    return context.compare(config, lambda features: few_shot_accuracy(features, shots, config, context.device))


def few_shot_accuracy(features: Features, shots: list[int], config: Config, device: torch.device) -> Numbers:
    """Mean and deviation of the accuracy for each number of shots."""
    labels, test_labels = features.labels()
    train, test = F.normalize(features.train, dim=1).to(device), F.normalize(features.test, dim=1).to(device)
    classes = int(max(labels.max(), test_labels.max())) + 1
    numbers: Numbers = {}
    for shot in shots:
        runs = []
        for draw in range(config.draws):
            places = number_of_each(labels, shot, draw, config.seed)
            decay = 1 / (config.cost * len(places))
            seen, known = train[places.to(device)], labels[places].to(device)
            classify = fit_linear(seen, known, decay, config.iterations, classes)
            runs.append({f"top1_{shot}shot": top_accuracies(classify(test), test_labels)["top1"]})
        numbers |= mean_and_deviation(runs)
    return numbers
