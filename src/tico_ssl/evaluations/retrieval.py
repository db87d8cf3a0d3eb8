"""Retrieval: training images ranked by cosine similarity to test images; those of the same class should come first."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.data.source import spread_evenly
from tico_ssl.evaluations._classification.settings import Positive
from tico_ssl.evaluations._context import Context
from tico_ssl.features.evidence import Scores, means
from tico_ssl.features.frozen import Features
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Result
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track

SIMILARITIES = 2**24  # in memory at a time

COST = "features"
METRICS = (
    Metric("map*", "%", better="higher", verdict=True),
    Metric("precision_at_*", "%", better="higher"),
    Metric("recall_at_*", "%", better="higher"),
)


class Config(Section):
    """Ranks and queries."""

    ks: Annotated[tuple[Positive, ...], Field(min_length=1, strict=False)] = (1, 5, 10)
    """Values of k for precision and recall at k."""
    queries: Positive = 10_000
    """Test images as queries, at most, spread evenly; each ranks all training images."""


def run(context: Context, config: Config) -> Result:
    """Mean average precision, precision and recall of every representation, in per cent."""
    context.labels()
    return context.compare(config, lambda features: retrieved(features, config, context.device, context.protocol))


@torch.no_grad()
def retrieved(
    features: Features, config: Config, device: torch.device | None = None, label: str | None = None
) -> Scores:
    """In per cent: `map` over all ranks; `map_at_r` up to rank R, the number of images of the class; `precision_at_k`,
    the share of the class among the first k; `recall_at_k`, the share of queries with at least one among them.

    Queries whose class has no training image are left out.
    """
    labels, asked = features.labels()
    device = device or features.train.device
    members = torch.bincount(labels, minlength=int(max(labels.max(), asked.max())) + 1)
    possible = (members[asked] > 0).nonzero().ravel()
    if len(possible) == 0:
        raise UserError("retrieval needs a class that training and test images share; there is none")
    possible = possible[spread_evenly(len(possible), config.queries)]
    bank, labels, members = features.train.to(device), labels.to(device), members.to(device)
    lengths = bank.norm(dim=1).clamp_min(1e-12)
    parts = possible.split(max(1, SIMILARITIES // len(bank)))
    found: dict[str, list[Tensor]] = {}
    for part in track(parts, len(parts), label):
        queries, wanted = F.normalize(features.test[part].to(device), dim=1), asked[part].to(device)
        order = (queries @ bank.T / lengths).argsort(dim=1, descending=True, stable=True)
        for name, values in _scores(labels[order] == wanted[:, None], members[wanted], config.ks).items():
            found.setdefault(name, []).append(values.cpu())
    return means({name: torch.cat(values) for name, values in found.items()})


def _scores(hits: Tensor, members: Tensor, ks: tuple[int, ...]) -> dict[str, Tensor]:
    """Metrics per query, from rankings (queries, bank) that mark the images of the query's class."""
    ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    precision = hits.cumsum(dim=1).double() / ranks * hits  # at ranks with an image of the class, zero elsewhere
    scores = {
        "map": precision.sum(dim=1) / members,
        "map_at_r": (precision * (ranks <= members[:, None])).sum(dim=1) / members,
    }
    for k in ks:
        first = hits[:, :k]
        scores[f"precision_at_{k}"] = first.double().sum(dim=1) / k
        scores[f"recall_at_{k}"] = first.any(dim=1)
    return scores
