"""Few-shot: logistic regression on frozen features of 1, 5 and 10 labelled images per class.

Features have unit length and C = 1, as in Tian et al. (2020). Mean and standard deviation over several draws.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.evaluations._classification.settings import Positive
from tico_ssl.evaluations._classification.subsets import number_of_each
from tico_ssl.evaluations._context import Context
from tico_ssl.features.evidence import Scores, accuracies
from tico_ssl.features.frozen import Features
from tico_ssl.features.regression import fit_linear
from tico_ssl.results.metrics import TOP1
from tico_ssl.results.record import Result
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

COST = "features"
METRICS = (TOP1,)


class Config(Section):
    """Shots, draws and the classifier."""

    shots: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1, 5, 10)
    """Labelled images per class."""
    draws: Positive = 5
    """Random subsets per number of shots; disjoint as long as a class has enough images."""
    cost: Annotated[float, Field(gt=0)] = 1.0
    """C of the regression: weight of the error of one image against half the squared weights."""
    iterations: Positive = 100
    """L-BFGS iterations, at most."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the draws."""


def run(context: Context, config: Config) -> Result:
    """Accuracy on all test images, in per cent."""
    labels, _ = context.labels()
    fewest = int(labels.unique(return_counts=True)[1].min())
    shots = [number for number in config.shots if number <= fewest]
    if not shots:
        raise UserError(
            f"{context.protocol} needs {counted(min(config.shots), 'image')} per class, one has {fewest}: lower shots"
        )
    if too_many := [number for number in config.shots if number > fewest]:
        left_out = ", ".join(map(str, too_many))
        say(f"{context.protocol} leaves out {left_out} images per class: one class has only {fewest}")
    return context.compare(config, lambda features: few_shot_accuracy(features, shots, config, context.device))


def few_shot_accuracy(features: Features, shots: list[int], config: Config, device: torch.device) -> Scores:
    """Mean and standard deviation of the accuracy for each number of shots."""
    labels, test_labels = features.numbered()
    train, test = F.normalize(features.train, dim=1).to(device), F.normalize(features.test, dim=1).to(device)
    right: dict[str, Tensor] = {}
    for shot in shots:
        draws = []
        for draw in range(config.draws):
            places = number_of_each(labels, shot, draw, config.seed)
            decay = 1 / (config.cost * len(places))
            seen, known = train[places.to(device)], labels[places].to(device)
            classify = fit_linear(seen, known, decay, config.iterations)
            draws.append(classify(test).argmax(dim=1).cpu() == test_labels)
        right[f"top1_{shot}shot"] = torch.stack(draws)
    return accuracies(right)
