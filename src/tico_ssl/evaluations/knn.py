"""kNN: weighted votes of the nearest training features, by cosine."""

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tico_ssl.evaluations import Context, Features, Numbers, Result
from tico_ssl.section import Section


class Voters(Section):
    """How many neighbours vote, and how sharply near ones outweigh far ones."""

    k: Annotated[int, Field(ge=1)]
    """Neighbours."""
    temperature: Annotated[float, Field(gt=0)]
    """A vote counts exp(cosine / temperature)."""


class Config(Section):
    """The two settings in common use: DINO's and MoCo's."""

    voters: Annotated[tuple[Voters, ...], Field(min_length=1, strict=False)] = (
        Voters(k=20, temperature=0.07),
        Voters(k=200, temperature=0.1),
    )
    """Every pair is reported."""


def run(context: Context, config: Config) -> Result:
    """kNN accuracy of every representation, in per cent."""
    return context.compare("knn", config, lambda features: knn_accuracy(features, config))


def knn_accuracy(features: Features, config: Config) -> Numbers:
    """Accuracy of every pair of settings, in per cent."""
    train_labels, test_labels = features.labels("knn")
    votes = knn_predictions(features.train, train_labels, features.test, config.voters)
    return {
        f"top1_k{voter.k}": 100 * float((predicted == test_labels).float().mean())
        for voter, predicted in zip(config.voters, votes)
    }


def knn_predictions(
    train: Tensor, labels: Tensor, queries: Tensor, voters: Sequence[Voters], chunk: int = 1024
) -> list[Tensor]:
    """Predicted classes for each pair of settings; similarities are held for one chunk of queries at a time."""
    train = F.normalize(train, dim=1)
    classes = int(labels.max()) + 1
    largest = min(max(voter.k for voter in voters), len(train))
    predictions: list[list[Tensor]] = [[] for _ in voters]
    for part in F.normalize(queries, dim=1).split(chunk):
        similarity, nearest = (part @ train.T).topk(largest, dim=1)
        neighbours = labels[nearest]
        for voter, found in zip(voters, predictions):
            weights = torch.exp((similarity[:, : voter.k] - similarity[:, :1]) / voter.temperature)
            scores = weights.new_zeros(len(part), classes).scatter_add_(1, neighbours[:, : voter.k], weights)
            found.append(scores.argmax(dim=1))
    return [torch.cat(found) for found in predictions]
