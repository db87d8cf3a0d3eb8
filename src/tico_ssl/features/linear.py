"""Softmax regression on standardised features, its weight decay chosen on held-out training images."""

import torch
from torch import Tensor

from tico_ssl.features.frozen import Features
from tico_ssl.features.regression import fit_linear, fit_linears
from tico_ssl.features.scores import top_accuracies
from tico_ssl.features.settings import LinearConfig
from tico_ssl.results.record import Numbers
from tico_ssl.runtime.randomness import generator


def probe(features: Features, config: LinearConfig, device: torch.device) -> Numbers:
    """Accuracy in per cent, and the chosen weight decay. Features move to the device as a whole."""
    train_labels, test_labels = (labels.to(device) for labels in features.labels())
    train, test = features.train.to(device), features.test.to(device)
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    train, test = (train - mean) / std, (test - mean) / std
    weight_decay = _best_decay(train, train_labels, config)
    logits = fit_linear(train, train_labels, weight_decay, config.iterations)(test)
    return top_accuracies(logits, test_labels) | {"weight_decay": weight_decay}


def _best_decay(train: Tensor, labels: Tensor, config: LinearConfig) -> float:
    if len(config.weight_decays) == 1:
        return config.weight_decays[0]
    order = torch.randperm(len(train), generator=generator(config.seed, "probe")).to(train.device)
    held = max(1, round(config.held_out * len(train)))
    out, kept = order[:held], order[held:]

    classes = int(labels.max()) + 1
    linears = fit_linears(train[kept], labels[kept], config.weight_decays, config.iterations, classes)
    right = [int((linear(train[out]).argmax(dim=1) == labels[out]).sum()) for linear in linears]
    return config.weight_decays[right.index(max(right))]
