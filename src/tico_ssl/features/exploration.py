"""A map of embedded images, nearest neighbours of some of them, and a confusion matrix.

For the report; results are plain arrays.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits
from torch import Tensor

from tico_ssl.data.given import Given
from tico_ssl.data.source import Source, spread_evenly
from tico_ssl.data.sources import required, shown
from tico_ssl.data.stored import open_stored
from tico_ssl.features.cache import FeatureCache
from tico_ssl.features.extraction import Extracted, needed_side
from tico_ssl.features.knn import knn_predictions
from tico_ssl.features.picture import MOST_COLOURS, NEIGHBOURS, VOTERS, Images, Picture
from tico_ssl.features.settings import Voters
from tico_ssl.features.splits import splits
from tico_ssl.features.subjects import Subject, open_subject
from tico_ssl.features.thumbnails import smallest_side, thumbnails
from tico_ssl.runtime.device import choose_device, tune_process
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.wording import counted

THUMBNAIL, LARGE_THUMBNAIL = 48, 96  # pixels, in the map and in the gallery
BANK = 10_000  # training images in the kNN bank, where their features have to be extracted first
EVALUATED_BANK = 200_000  # and where an evaluation has cached them
LANDMARKS = 4_000  # points that t-SNE arranges; 10,000 would take it minutes
ANGLE = 0.8  # of Barnes-Hut: neighbourhoods are kept as well as with 0.5, in two thirds of the time
CLUSTERS = 12


def picture_of(
    run: str | Path, data: Given | None, points: int, galleries: int, evaluated: Sequence[str] = ()
) -> Picture:
    """Embed images of a run's data, or others. `evaluated`: checkpoints whose features an evaluation has cached."""
    subject = open_subject(run, data)
    train, test = _splits(subject, needed_side(subject.backbone))
    asked = test.limited(points)
    bank = train.limited(EVALUATED_BANK if subject.checkpoint in evaluated else BANK)
    cache, device = FeatureCache(subject.home / "features"), choose_device()
    tune_process(device)
    of_bank = cache.extract(subject.backbone, bank, device, "embedding")
    of_test = cache.extract(subject.backbone, asked, device, "embedding")

    small_bank, small_asked = _as_small_as_will_do(subject, bank, asked)
    side, large = (smallest_side([small_bank, small_asked], most) for most in (THUMBNAIL, LARGE_THUMBNAIL))
    classified = all(source.labels is not None and source.labels.ndim == 1 for source in (bank, asked))

    chosen = _spread(of_test, asked if classified else None, galleries)
    similarity, nearest = _nearest(of_test.features[chosen], of_bank.features)
    more = _filling(of_bank, points - len(of_test.places))
    features = torch.cat([of_test.features, of_bank.features[more]])
    positions, how = project(F.normalize(features, dim=1).numpy())
    counts = counted(len(of_test.places), "test image") + (
        f" and {counted(len(more), 'training image')}" if len(more) else ""
    )
    both = [
        _images(small_asked, asked, of_test.places, side, classified),
        _images(small_bank, bank, of_bank.places[more], side, classified),
    ]
    classes = _classes(train, classified)
    return Picture(
        data=shown(subject.data),
        classes=classes,
        points=_joined(both),
        positions=positions,
        clusters=None if classified and len(classes) <= MOST_COLOURS else clusters(features.numpy()),
        how=f"{counts}, {how}",
        queries=_images(small_asked, asked, of_test.places[chosen], large, classified),
        neighbours=_images(small_bank, bank, of_bank.places[nearest.ravel()], large, classified),
        similarity=similarity.numpy(),
        confusion=_confusion(of_bank, bank, of_test, asked) if classified else None,
    )


def _splits(subject: Subject, shorter: int) -> tuple[Source, Source]:
    """Training and test images, those that are decoded already from where they are kept."""
    data, channels = subject.data, subject.backbone.config.channels
    train = required(open_stored(data, "train", channels, shorter, fill=False), data)
    train, test, *_ = splits(train, open_stored(data, "test", channels, shorter, fill=False), subject.seed)
    return train, test


def _as_small_as_will_do(subject: Subject, bank: Source, asked: Source) -> tuple[Source, Source]:
    """The same images for thumbnails: files are decoded at thumbnail size."""
    if bank.images is not None and asked.images is not None:
        return bank, asked
    train, test = _splits(subject, LARGE_THUMBNAIL)
    return train.limited(len(bank)), test.limited(len(asked))


def _classes(source: Source, classified: bool) -> list[str]:
    if not classified or source.labels is None:
        return []
    return [printable(name) for name in source.classes] or [str(i) for i in range(int(source.labels.max()) + 1)]


def _spread(extracted: Extracted, source: Source | None, count: int) -> Tensor:
    """Indices into the features: classes in turn, by a fixed random order, so that no image is hand-picked."""
    order = torch.randperm(len(extracted.places), generator=torch.Generator().manual_seed(0))
    if source is not None and source.labels is not None:
        labels = source.labels[extracted.places][order]
        turn = torch.zeros(len(order), dtype=torch.int64)
        for label in labels.unique():
            members = (labels == label).nonzero().ravel()
            turn[members] = torch.arange(len(members))
        order = order[torch.argsort(turn * (int(labels.max()) + 1) + labels)]
    return order[:count]


def _nearest(queries: Tensor, bank: Tensor) -> tuple[Tensor, Tensor]:
    cosine = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    similarity, nearest = cosine.topk(min(NEIGHBOURS, len(bank)), dim=1)
    return similarity, nearest


def _filling(extracted: Extracted, wanted: int) -> Tensor:
    """Indices of training images, spread evenly, that fill the map up to the wanted number of points."""
    return spread_evenly(len(extracted.places), max(0, wanted))


def _confusion(of_bank: Extracted, bank: Source, of_test: Extracted, asked: Source) -> np.ndarray:
    assert bank.labels is not None
    assert asked.labels is not None
    known, true = bank.labels[of_bank.places], asked.labels[of_test.places]
    predicted = knn_predictions(of_bank.features, known, of_test.features, [Voters(k=VOTERS, temperature=0.07)])[0]
    classes = max(int(known.max()), int(true.max()), len(bank.classes) - 1) + 1
    return torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes).numpy()


def _images(small: Source, source: Source, places: Tensor, side: int, classified: bool) -> Images:
    labels = source.labels[places].numpy() if classified and source.labels is not None else None
    names = [printable(source.names(place)) for place in places.tolist()]
    return Images(names, labels, thumbnails(small, places, side))


def _joined(parts: Sequence[Images]) -> Images:
    labels = [part.labels for part in parts if part.labels is not None]
    return Images(
        [name for part in parts for name in part.names],
        np.concatenate(labels) if len(labels) == len(parts) else None,
        np.concatenate([part.thumbnails for part in parts]),
    )


def clusters(features: np.ndarray) -> np.ndarray:
    """The k-means cluster of each image: colours for images without classes."""
    count = min(CLUSTERS, max(1, len(features) // 4))
    found: np.ndarray = MiniBatchKMeans(count, n_init=3, random_state=0).fit_predict(features)
    return found


def project(features: np.ndarray) -> tuple[np.ndarray, str]:
    """Positions of images in two dimensions, and how they were found: UMAP where it is installed, else t-SNE."""
    count = len(features)
    if count < 30:
        return _padded(PCA(min(2, *features.shape), random_state=0).fit_transform(features)), "by PCA"
    dimensions = min(50, *features.shape)
    reduced = PCA(dimensions, random_state=0).fit_transform(features)
    if importlib.util.find_spec("umap") is not None:
        import umap

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # UMAP warns that a seed means one thread
            return umap.UMAP(random_state=0).fit_transform(reduced), f"by UMAP of {dimensions} principal components"
    marks = spread_evenly(count, LANDMARKS).numpy()
    perplexity = min(30.0, (len(marks) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, max_iter=500, init="pca", angle=ANGLE, random_state=0)
    # Its threads wait for each other: with one for every core, up to three times as long where others use these too.
    with threadpool_limits(max(1, torch.get_num_threads() // 2), "openmp"):
        embedded = tsne.fit_transform(reduced[marks])
    how = f"by t-SNE of {dimensions} principal components"
    if len(marks) == count:
        return embedded, how
    how += f", fitted to {len(marks):,} of them; the others are placed beside their nearest neighbours"
    return _placed(reduced, marks, embedded), how


def _placed(points: np.ndarray, marks: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    """All points on a map of some: each at a weighted mean of its three nearest, with a little noise."""
    distance, nearest = NearestNeighbors(n_neighbors=3).fit(points[marks]).kneighbors(points)
    weights = 1 / np.maximum(distance, 1e-6)
    placed = (embedded[nearest] * weights[..., None]).sum(1) / weights.sum(1, keepdims=True)
    # Between two groups the mean would lie in empty space, so it is pulled towards the nearest one.
    placed = 0.5 * placed + 0.5 * embedded[nearest[:, 0]]
    reach = np.linalg.norm(embedded.max(0) - embedded.min(0))
    placed += np.random.default_rng(0).normal(scale=0.003 * reach, size=placed.shape)
    placed[marks] = embedded
    result: np.ndarray = placed
    return result


def _padded(positions: np.ndarray) -> np.ndarray:
    return np.pad(positions, ((0, 0), (0, 2 - positions.shape[1])))
