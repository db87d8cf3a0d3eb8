"""kNN classification: weighted votes of the nearest training features by cosine similarity."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.features.evidence import Scores, accuracies
from tico_ssl.features.frozen import Features
from tico_ssl.features.neighbours import BANK_CHUNK, QUERY_CHUNK, nearest
from tico_ssl.features.settings import KnnConfig, Voters


def knn_accuracy(
    features: Features, config: KnnConfig, device: torch.device | None = None, label: str | None = None
) -> Scores:
    """Accuracy for every pair of k and temperature, in per cent."""
    train_labels, test_labels = features.labels()
    votes = knn_predictions(features.train, train_labels, features.test, config.voters, device=device, label=label)
    names = metric_names(config.voters)
    return accuracies({name: predicted == test_labels for name, predicted in zip(names, votes)})


def metric_names(voters: Sequence[Voters]) -> list[str]:
    """The metric's name for each pair: with its temperature where several have the same k."""
    counts = [voter.k for voter in voters]
    return [f"top1_k{voter.k}" + (f"_t{voter.temperature:g}" if counts.count(voter.k) > 1 else "") for voter in voters]


def knn_predictions(
    train: Tensor,
    labels: Tensor,
    queries: Tensor,
    voters: Sequence[Voters],
    chunk: int = QUERY_CHUNK,
    bank_chunk: int = BANK_CHUNK,
    device: torch.device | None = None,
    label: str | None = None,
) -> list[Tensor]:
    """Predicted classes for each pair of k and temperature, in chunks of queries and of the bank."""
    most = max(voter.k for voter in voters)
    found = nearest(train, queries, most, device=device, label=label, query_chunk=chunk, bank_chunk=bank_chunk)
    classes = int(labels.max()) + 1
    neighbours = labels.to(found.places.device)[found.places]
    return [
        torch.cat(
            [
                _votes(cosines[:, : voter.k], classed[:, : voter.k], voter.temperature, classes)
                for cosines, classed in zip(found.cosines.split(chunk), neighbours.split(chunk))
            ]
        ).to(labels.device)
        for voter in voters
    ]


def _votes(cosines: Tensor, neighbours: Tensor, temperature: float, classes: int) -> Tensor:
    weights = torch.exp((cosines - cosines[:, :1]) / temperature)  # the nearest has weight one, so nothing overflows
    scores = weights.new_zeros(len(weights), classes).scatter_add_(1, neighbours, weights)
    return scores.argmax(dim=1)
