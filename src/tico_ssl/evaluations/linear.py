"""Linear probe: softmax regression on frozen, standardised features.

The quick form, on features of unaugmented images: full-batch L-BFGS, the decay chosen on held-out training images.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.classification.regression import fit_linear, fit_linears
from tico_ssl.classification.scores import top_accuracies
from tico_ssl.evaluations import Context, Features, Numbers, Result
from tico_ssl.randomness import generator
from tico_ssl.section import Section


class Config(Section):
    """Settings of the probe."""

    weight_decays: Annotated[tuple[float, ...], Field(min_length=1, strict=False)] = (1e-5, 1e-4, 1e-3, 1e-2)
    """Candidates, of which the best on held-out training images is taken."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training images that choose the decay."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Of L-BFGS."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the choice of held-out images."""


def run(context: Context, config: Config) -> Result:
    """Accuracy of a linear classifier on every representation, in per cent."""
    context.labels("linear")
    return context.compare("linear", config, lambda features: probe(features, config, context.device))


def probe(features: Features, config: Config, device: torch.device) -> Numbers:
    """Accuracy in per cent, and the decay that was chosen. Computed where the features fit."""
    train_labels, test_labels = (labels.to(device) for labels in features.labels("linear"))
    train, test = features.train.to(device), features.test.to(device)
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    weight_decay = _best_decay(train, train_labels, config)
    logits = fit_linear(train, train_labels, weight_decay, config.iterations)(test)
    return top_accuracies(logits, test_labels) | {"weight_decay": weight_decay}


def _best_decay(train: Tensor, labels: Tensor, config: Config) -> float:
    if len(config.weight_decays) == 1:
        return config.weight_decays[0]
    order = torch.randperm(len(train), generator=generator(config.seed, "probe")).to(train.device)
    held = max(1, round(config.held_out * len(train)))
    out, kept = order[:held], order[held:]

    classes = int(labels.max()) + 1
    linears = fit_linears(train[kept], labels[kept], config.weight_decays, config.iterations, classes)
    right = [int((linear(train[out]).argmax(dim=1) == labels[out]).sum()) for linear in linears]
    return config.weight_decays[right.index(max(right))]
