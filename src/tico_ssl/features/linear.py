"""Softmax regression on standardised features, its weight decay chosen on held-out training images."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tico_ssl.features.evidence import Scores
from tico_ssl.features.frozen import Features
from tico_ssl.features.regression import fit_linear, fit_linears
from tico_ssl.features.scores import top_accuracies
from tico_ssl.features.settings import LinearConfig
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator


class Probe(NamedTuple):
    """A linear classifier of standardised features, and how they are standardised."""

    linear: nn.Linear
    mean: Tensor
    std: Tensor
    weight_decay: float

    def __call__(self, features: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.linear((features - self.mean) / self.std)
        return logits

    @torch.no_grad()
    def folded(self) -> nn.Linear:
        """The same classifier as one linear layer on features as they are."""
        weight = self.linear.weight.double() / self.std
        bias = self.linear.bias - weight @ self.mean.double()
        layer = nn.Linear(weight.shape[1], weight.shape[0]).requires_grad_(False)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
        return layer


def probe(features: Features, config: LinearConfig, device: torch.device) -> Scores:
    """Accuracy in per cent, and the chosen weight decay. Features move to the device as a whole."""
    train_labels, test_labels = (labels.to(device) for labels in features.numbered())
    fitted = fit_probe(features.train.to(device), train_labels, config)
    logits = fitted(features.test.to(device))
    return top_accuracies(logits, test_labels) | {"weight_decay": fitted.weight_decay}


def fit_probe(
    features: Tensor,
    labels: Tensor,
    config: LinearConfig,
    classes: int | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
) -> Probe:
    """The classifier of these training images with the best weight decay: on validation images, given as features and
    labels, or else on training images that are held out for the choice."""
    if len(features) < 2:
        raise UserError(f"a linear classifier needs two training images or more, not {len(features)}")
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    features = (features - mean) / std
    if validation is None:
        weight_decay = _best_decay(features, labels, config)
    else:
        weight_decay = _best_on((features, labels), ((validation[0] - mean) / std, validation[1]), config)
    return Probe(fit_linear(features, labels, weight_decay, config.iterations, classes), mean, std, weight_decay)


def number_held_out(images: int, config: LinearConfig) -> int:
    """Of how many training images the weight decay is chosen: at least one, and one is left to train on."""
    return min(images - 1, max(1, round(config.held_out * images)))


def _best_decay(train: Tensor, labels: Tensor, config: LinearConfig) -> float:
    if len(config.weight_decays) == 1:
        return config.weight_decays[0]
    order = torch.randperm(len(train), generator=generator(config.seed, "probe")).to(train.device)
    held = number_held_out(len(train), config)
    out, kept = order[:held], order[held:]
    return _best_on((train[kept], labels[kept]), (train[out], labels[out]), config, int(labels.max()) + 1)


def _best_on(
    train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], config: LinearConfig, classes: int | None = None
) -> float:
    """The weight decay of the most accurate classifier, the smallest of equally good ones; from features and labels."""
    linears = fit_linears(*train, config.weight_decays, config.iterations, classes)
    features, labels = validation
    right = [int((linear(features).argmax(dim=1) == labels).sum()) for linear in linears]
    return config.weight_decays[right.index(max(right))]
