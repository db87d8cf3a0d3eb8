"""Corruptions: accuracy of classifiers trained on clean images when test images are noisy, blurred or pale.

Five severities of eight common corruptions (Hendrycks and Dietterich, 2019). Types and strengths: `corruption.py`.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tico_ssl.config.section import Section
from tico_ssl.evaluations._classification.settings import Positive, Rate
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._representation.corruption import corrupt, strength
from tico_ssl.evaluations._representation.settings import SEVERITIES, STRENGTHS
from tico_ssl.features.batches import BATCH, own_share, prepared_batches
from tico_ssl.features.evidence import Scores, means, resampled
from tico_ssl.features.extraction import in_order
from tico_ssl.features.knn import knn_predictions
from tico_ssl.features.regression import fit_linear
from tico_ssl.features.settings import Voters
from tico_ssl.results.metrics import Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime import distributed
from tico_ssl.runtime.progress import track
from tico_ssl.runtime.randomness import generator
from tico_ssl.views import operations
from tico_ssl.views.centre import centre_crop

DRAW = 11  # random stream of the noise within the purpose "probe"

Classifier = Callable[[Tensor], Tensor]

COST = "head"
METRICS = (Metric("*_lost", "%", better="lower"), Metric("*", "%", better="higher"))


class Config(Section):
    """Which corruptions of which images, and the classifiers."""

    kinds: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = tuple(STRENGTHS)
    """Corruption types."""
    images: Positive = 500
    """Test images, at most, spread evenly; each is corrupted in every type and severity."""
    k: Positive = 20
    """Neighbours of the kNN classifier (temperature 0.07)."""
    weight_decay: Rate = 1e-3
    """Weight decay of the linear probe on standardised features."""
    iterations: Positive = 100
    """L-BFGS iterations of the probe, at most."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the noise."""


def run(context: Context, config: Config) -> Result:
    """For kNN and the linear probe, in per cent: clean accuracy, mean accuracy over all corruptions and severities, the
    share of the clean accuracy that is lost, and the mean per corruption. The accuracy at each severity is in the
    result's data, under `severities`."""
    begun = perf_counter()
    context.labels()
    for kind in config.kinds:  # a misspelt type is an error before the work begins
        strength(kind, 1, 1)
    classifiers = {name: _classifiers(context, name, config) for name in context.backbones}
    clean = [_central_squares(context, names[0], config.images) for names in context.alike]
    cases: list[tuple[str, int]] = [("clean", 0), *((kind, level) for kind in config.kinds for level in SEVERITIES)]
    right: dict[str, dict[str, dict[str, list[Tensor]]]] = {name: {} for name in context.backbones}
    for kind, level in track(cases, len(cases), context.protocol):
        for names, (squares, labels) in zip(context.alike, clean, strict=True):
            draw = generator(config.seed, "probe", DRAW, ([*STRENGTHS].index(kind) if level else 0), level)
            features = _features(context, names, squares, kind, level, draw)
            for name, seen in features.items():
                for classifier, classify in classifiers[name].items():
                    hits = classify(seen).cpu() == labels
                    right[name].setdefault(classifier, {}).setdefault(kind, []).append(hits)
    numbers: dict[str, Numbers] = {name: Scores() for name in right}
    levels: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in right}
    for name, by_classifier in right.items():
        for classifier, found in by_classifier.items():
            numbers[name] = numbers[name] | _summary(classifier, found)
            levels[name][classifier] = {kind: [_per_cent(hits) for hits in each] for kind, each in found.items()}
    return context.result(config, numbers, perf_counter() - begun, severities=levels, tested=len(clean[0][1]))


def _central_squares(context: Context, name: str, most: int) -> tuple[Tensor, Tensor]:
    """The central crops of the test images for a backbone as bytes, and their classes: corruptions come after the
    crop. Of several processes each decodes a share."""
    source = context.images(name)[1].limited(most)
    assert source.labels is not None
    like = context.backbones.lazy[name].like
    size = like.image_size
    shape = (like.config.channels, size, size)
    share, mine = own_share(source)
    squares, places = [torch.empty(0, *shape, dtype=torch.uint8)], list[int]()
    for images, at in prepared_batches(share, lambda given, _: centre_crop(given, size), shape, torch.device("cpu")):
        squares.append((images.clamp(0, 1) * 255).round().to(torch.uint8).contiguous())
        places += at
    found = in_order(torch.cat(squares), mine[places])
    context.unread.note("test", source, found.places)
    return found.features, source.labels[found.places]


def _classifiers(context: Context, name: str, config: Config) -> dict[str, Classifier]:
    """kNN and a linear probe on a backbone's clean training features."""
    features = context.features(name, exact=True)  # as those of the corrupted images are
    labels, _ = features.labels()
    classes, numbers = labels.to(context.device).unique(return_inverse=True)
    train = features.train.to(context.device)
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    linear = fit_linear((train - mean) / std, numbers, config.weight_decay, config.iterations)
    voter = Voters(k=config.k, temperature=0.07)
    return {
        "knn": lambda asked: classes[knn_predictions(train, numbers, asked, [voter])[0]],
        "linear": lambda asked: classes[linear((asked - mean) / std).argmax(dim=1)],
    }


@torch.no_grad()
def _features(
    context: Context,
    names: Sequence[str],
    clean: Tensor,
    kind: str,
    severity: int,
    draw: torch.Generator,
) -> dict[str, Tensor]:
    """Features of some backbones for corrupted images; severity 0 leaves them clean. Of several processes each takes
    batches in turn; all draw the noise of all, which costs little."""
    widths = {name: context.backbones.lazy[name].like.width for name in names}
    features = {name: [torch.empty(0, width, device=context.device)] for name, width in widths.items()}
    mine: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    for number, places in enumerate(torch.arange(len(clean)).split(BATCH)):
        part = clean[places]
        part = corrupt(part, kind, severity, draw) if severity else part
        if number % distributed.world_size() != distributed.rank():
            continue
        mine.append(places)
        seen = (part.to(context.device) / 255).contiguous(memory_format=torch.channels_last)  # a third faster on a CPU
        for name in names:
            backbone = context.backbones[name]
            backbone.eval().to(context.device)
            features[name].append(backbone(operations.normalise(seen, backbone.mean, backbone.std)))
    places = torch.cat(mine)
    return {name: in_order(torch.cat(parts), places).features.to(context.device) for name, parts in features.items()}


def _summary(classifier: str, right: dict[str, list[Tensor]]) -> Scores:
    """Summary metrics of a classifier, from the test images that are right at each severity of a type."""
    (clean,) = right["clean"]
    kinds = {kind: torch.stack(found).double().mean(dim=0) for kind, found in right.items() if kind != "clean"}
    found = means({"clean": clean, "corrupted": torch.stack([*kinds.values()]).mean(dim=0), **kinds})
    lost = 100 * (1 - found["corrupted"] / found["clean"]) if found["clean"] else 0.0
    each, unharmed = torch.stack([*kinds.values()]).mean(dim=0).numpy(), clean.double().numpy()

    def lost_on(counts: np.ndarray) -> np.ndarray:
        whole = counts @ unharmed
        kept: np.ndarray = np.divide(counts @ each, whole, out=np.ones(len(counts)), where=whole > 0)
        return 100 * (1 - kept)

    return (
        Scores({name: found[name] for name in ("clean", "corrupted")}, found.evidence)
        | Scores({"lost": lost}, {"lost": resampled(lost, lost_on, len(clean))})
        | {kind: found[kind] for kind in kinds}
    ).renamed(lambda name: f"{classifier}_{name}")


def _per_cent(right: Tensor) -> float:
    return 100 * float(right.double().mean())
