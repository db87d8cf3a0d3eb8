"""Clustering: agreement of k-means clusters of the test features with the classes."""

import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.nn.functional import normalize

from tico_ssl.config.section import Section
from tico_ssl.data.source import spread_evenly
from tico_ssl.evaluations._classification.settings import Positive
from tico_ssl.evaluations._context import Context
from tico_ssl.features.evidence import Evidence, Scores, resampled
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.randomness import derived_seed

COST = "features"
METRICS = tuple(Metric(name, "%", better="higher") for name in ("nmi", "ari", "accuracy"))


class Config(Section):
    """Settings of k-means."""

    clusters: Annotated[int, Field(ge=2)] | None = None
    """Number of clusters; by default the number of classes."""
    restarts: Positive = 10
    """k-means++ initialisations; the one with the smallest inertia is kept (labels are not used)."""
    iterations: Positive = 300
    """Iterations per initialisation, at most."""
    unit_length: bool = True
    """Normalise features to unit length first."""
    images: Positive = 50_000
    """Test images, at most, spread evenly."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initialisations."""


def run(context: Context, config: Config) -> Result:
    """Agreement of clusters and classes for every representation, in per cent."""
    begun = perf_counter()
    context.labels()
    numbers: dict[str, Numbers] = {}
    for name in context.representations:
        features = context.features(name)
        _, labels = features.labels()
        places = spread_evenly(len(labels), config.images)
        chosen, truth = features.test[places], labels[places].numpy()
        numbers[name] = agreement(cluster(chosen, len(np.unique(truth)), config, f"{context.protocol} {name}"), truth)
    return context.result(config, numbers, perf_counter() - begun)


def cluster(features: Tensor, classes: int, config: Config, label: str | None = None) -> np.ndarray:
    """The cluster of every image, from the best of several k-means."""
    count = config.clusters or classes
    if not 2 <= count <= len(features):
        raise UserError(f"clustering needs between 2 and {len(features)} clusters for these images, not {count}")
    values = (normalize(features, dim=1) if config.unit_length else features).float().numpy()
    best: KMeans | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: collapse, no error
        for restart in track(range(config.restarts), config.restarts, label):
            beginning = derived_seed(config.seed, "probe", restart) % 2**32
            found = KMeans(count, n_init=1, max_iter=config.iterations, random_state=beginning).fit(values)
            if best is None or found.inertia_ < best.inertia_:
                best = found
    assert best is not None
    clusters: np.ndarray = best.labels_
    return clusters


def agreement(clusters: np.ndarray, truth: np.ndarray) -> Scores:
    """In per cent: normalised mutual information, adjusted Rand index, and accuracy. When images are resampled, their
    clusters stay, as the weights do."""
    (classes, rows), (named, columns) = (np.unique(of, return_inverse=True) for of in (truth, clusters))
    cells = rows * len(named) + columns

    def measured(counts: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
        """A metric, if each image counts so often (resamples, images)."""
        tables = (np.bincount(cells, of, len(classes) * len(named)) for of in counts)
        return np.array([100 * metric(table.reshape(len(classes), len(named))) for table in tables])

    numbers: Numbers = {}
    evidence: dict[str, Evidence] = {}
    for name, metric in AGREEMENTS.items():
        numbers[name] = float(measured(np.ones((1, len(truth))), metric)[0])
        evidence[name] = resampled(numbers[name], partial(measured, metric=metric), len(truth))
    return Scores(numbers, evidence)


def mutual_information(table: np.ndarray) -> float:
    """Of classes (rows) and clusters, normalised by the arithmetic mean of their entropies."""
    joint = table / table.sum()
    of_classes, of_clusters = joint.sum(1), joint.sum(0)
    both = _entropy(of_classes) + _entropy(of_clusters)
    return 2 * max(0.0, both - _entropy(joint)) / both if both > 0 else 1.0


def _entropy(shares: np.ndarray) -> float:
    there = shares[shares > 0]
    return float(-(there * np.log(there)).sum())


def rand_index(table: np.ndarray) -> float:
    """The share of pairs of images on which classes and clusters agree, adjusted for chance."""
    together, of_classes, of_clusters = (_pairs(of) for of in (table, table.sum(1), table.sum(0)))
    by_chance = of_classes * of_clusters / max(_pairs(table.sum(keepdims=True)), 1.0)
    most = (of_classes + of_clusters) / 2
    return (together - by_chance) / (most - by_chance) if most > by_chance else 1.0


def _pairs(counts: np.ndarray) -> float:
    return float((counts * (counts - 1)).sum() / 2)


def assigned(table: np.ndarray) -> float:
    """Accuracy under the best one-to-one assignment of clusters to classes."""
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / table.sum())


AGREEMENTS = {"nmi": mutual_information, "ari": rand_index, "accuracy": assigned}
