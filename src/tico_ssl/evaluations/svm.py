"""Linear SVMs on frozen features, one per class, as on VOC07: costs by cross-validation, mean average precision.

Data with one class per image become one-versus-rest problems.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC
from sklearn.utils.parallel import Parallel, delayed
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.data.source import spread_evenly
from tico_ssl.evaluations._classification.settings import Positive, Rate
from tico_ssl.evaluations._context import Context
from tico_ssl.features.evidence import RESAMPLES, Scores, accuracies, resampled
from tico_ssl.features.frozen import Features
from tico_ssl.features.scores import average_precision, average_precisions
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.results.metrics import TOP1, Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime.errors import UserError, refusal
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines, sealed, unsealed
from tico_ssl.runtime.progress import say, track
from tico_ssl.runtime.wording import counted

PRESENT, HARD, ABSENT = 1, 0, -1
MOST_WORK, FEWEST_RESAMPLES = 2**31, 200  # scores that the intervals are made of, over all resamples

COST = "head"
METRICS = (Metric("map", "%", better="higher", verdict=True), TOP1)


class Config(Section):
    """VISSL's settings, which the paper's comparison uses."""

    costs: Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = (
        *(0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0),
    )
    """Candidates for C of the SVM; the best in cross-validation is used, per class."""
    folds: Annotated[int, Field(ge=2)] = 3
    """Folds of the cross-validation on the training images."""
    positive_weight: Rate = 2.0
    """Weight of positive images; negative ones have weight 1."""
    iterations: Positive = 2_000
    """Solver iterations, at most."""
    most_images: Positive | None = 5_011
    """Training images, at most, spread evenly (VOC2007 has 5,011). null: all."""
    whole: bool = True
    """Use the whole image (squash resize) instead of the central crop, since objects at the edge matter."""


def run(context: Context, config: Config) -> Result:
    """Mean average precision over the classes, in per cent."""
    begun = perf_counter()
    context.labels(several=True)
    numbers: dict[str, Numbers] = {}
    for name in context.representations:

        def make(place: Path | None, name: str = name) -> Numbers:
            file = None if place is None else place.with_name(f"{place.name}.jsonl")
            return svm_precision(context.features(name, config.whole), config, f"{context.protocol} {name}", file)

        numbers[name] = context.part(config, name, make)
    return context.result(config, numbers, perf_counter() - begun)


def svm_precision(features: Features, config: Config, title: str | None = None, kept: Path | None = None) -> Scores:
    """Mean average precision in per cent and, with one class per image, the accuracy of the highest score.

    Finished classes are kept in a file, so that an interrupted evaluation continues.
    """
    train_labels, test_labels = features.raw_labels()
    single = train_labels.ndim == 1
    classes = int(max(train_labels.max(), test_labels.max())) + 1 if single else train_labels.shape[1]
    targets, truths = (
        np.where(labels.numpy()[:, None] == np.arange(classes), PRESENT, ABSENT) if single else labels.numpy()
        for labels in (train_labels, test_labels)
    )
    train, test = unit_length(features.train), unit_length(features.test)
    if config.most_images is not None:
        chosen = spread_evenly(len(train), config.most_images).numpy()
        train, targets = train[chosen], targets[chosen]
    possible = [
        i
        for i, (target, truth) in enumerate(zip(targets.T, truths.T, strict=True))
        if _both(target == PRESENT, config.folds) and _both(truth[truth != HARD] == PRESENT, 1)
    ]
    if not possible:
        several = counted(config.folds, "training image")
        raise UserError(f"svm needs a class that {several} and a test image have, and as many do not; there is none")
    sound = map(unsealed, read_json_lines(kept) if kept is not None else [])
    done = {line["class"]: line for line in sound if line is not None}
    waiting = [i for i in possible if i not in done]
    workers = min(len(waiting), default_workers()) or 1
    jobs = (delayed(_one_class)(train, targets[:, i], test, config) for i in waiting)
    with warnings.catch_warnings():
        # The iteration limit is part of the protocol, and high costs reach it.
        warnings.filterwarnings("ignore", "Liblinear failed to converge", ConvergenceWarning)
        made = Parallel(n_jobs=workers, prefer="threads", return_as="generator")(jobs)  # the solver releases the GIL
        for number, (cost, scores) in zip(waiting, track(made, len(waiting), title)):
            rated = truths[:, number] != HARD
            precision = average_precision(scores[rated], truths[rated, number] == PRESENT)
            done[number] = {"class": number, "cost": cost, "ap": precision, "scores": scores.tolist()}
            if kept is not None and not _keep(kept, done[number]):
                kept = None
    scores = np.stack([done[i]["scores"] for i in possible], axis=1)
    numbers = mean_precision([done[i]["ap"] for i in possible], scores, truths[:, possible])
    if single:
        named = torch.from_numpy(np.array(possible)[scores.argmax(axis=1)])
        numbers = numbers | accuracies({"top1": named == test_labels})
    return numbers


def mean_precision(precisions: Sequence[float], scores: np.ndarray, truths: np.ndarray) -> Scores:
    """Mean average precision in per cent, and on resampled images: from scores and truths (images, classes)."""

    def on(counts: np.ndarray) -> np.ndarray:
        by_class = [
            average_precisions(of[rated], truth[rated] == PRESENT, counts[:, rated])
            for of, truth in zip(scores.T, truths.T)
            for rated in [truth != HARD]
        ]
        mean: np.ndarray = np.nanmean(by_class, axis=0)
        return 100 * mean

    value = 100 * float(np.mean(precisions))
    resamples = max(FEWEST_RESAMPLES, min(RESAMPLES, MOST_WORK // scores.size))
    return Scores({"map": value}, {"map": resampled(value, on, len(scores), resamples)})


def _keep(file: Path, line: dict[str, Any]) -> bool:
    """Whether a class could be written down, so that an interrupted evaluation continues after it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        append_json_line(file, sealed(line))
    except OSError as error:
        say(f"warning: {file} cannot be written: {refusal(error)}; if interrupted, classes are evaluated again")
        return False
    return True


def unit_length(features: Tensor) -> np.ndarray:
    """Each row divided by its length, in float64; the small constant is VISSL's."""
    values = features.double().numpy()
    unit: np.ndarray = values / (np.linalg.norm(values, axis=1, keepdims=True) + 1e-5)
    return unit


def _one_class(train: np.ndarray, target: np.ndarray, test: np.ndarray, config: Config) -> tuple[float, np.ndarray]:
    """The best cost in cross-validation, and the test scores of an SVM trained with it on all training images.

    A difficult image is a negative in training, as in VISSL.
    """
    truth = np.where(target == PRESENT, 1, -1)
    cost = max(config.costs, key=lambda cost: _validated(train, truth, cost, config))
    return cost, make_svm(cost, config).fit(train, truth).decision_function(test)


def _validated(train: np.ndarray, truth: np.ndarray, cost: float, config: Config) -> float:
    scores = cross_val_score(make_svm(cost, config), train, truth, cv=config.folds, scoring="average_precision")
    return float(scores.mean())


def make_svm(cost: float, config: Config) -> LinearSVC:
    """One-versus-rest SVM. With more images than features the primal problem is solved, which has the same solution as
    VISSL's dual and converges sooner."""
    weights = {1: config.positive_weight, -1: 1.0}
    return LinearSVC(C=cost, class_weight=weights, max_iter=config.iterations, tol=1e-4, dual="auto", random_state=0)


def _both(present: np.ndarray, least: int) -> bool:
    """Whether there are so many positive and so many negative images: each fold needs one, and so does the test."""
    return min(int(present.sum()), int((~present).sum())) >= least
