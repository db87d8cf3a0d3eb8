"""kNN accuracy during pretraining, when the data have labels: the curve that shows whether features get better.

Optionally also a linear probe. It is fitted from scratch each time: a classifier that learns along with training would
always lag behind the features that it evaluates.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from tico_ssl.config.recipe import Recipe
from tico_ssl.config.views import shorter_side
from tico_ssl.data.fingerprint import require_same_everywhere
from tico_ssl.data.source import Source, evenly_spaced
from tico_ssl.data.stored import open_stored
from tico_ssl.features import linear
from tico_ssl.features.extraction import Extracted, extract
from tico_ssl.features.frozen import Features
from tico_ssl.features.kept import KeptBatches
from tico_ssl.features.knn import knn_accuracy
from tico_ssl.features.settings import KnnConfig, LinearConfig
from tico_ssl.features.splits import splits
from tico_ssl.networks.backbones import Backbone

QUICK = LinearConfig(weight_decays=(1e-3,))  # without a search for the weight decay


@dataclass(frozen=True)
class OnlineKnn:
    """Training images as the kNN bank, and test images as queries."""

    bank: Source
    queries: Source
    device: torch.device
    linear_probe: bool = False
    _kept: tuple[KeptBatches, KeptBatches] = field(default_factory=lambda: (KeptBatches(), KeptBatches()))

    @classmethod
    def of(cls, recipe: Recipe, source: Source, device: torch.device) -> "OnlineKnn | None":
        """For a recipe that asks for it, on data with one class per image."""
        settings, data = recipe.training, recipe.data
        if not settings.knn_every_epochs or not _classified(source):
            return None
        shorter = shorter_side(recipe.views, data.image_size)  # both splits decoded alike
        test = open_stored(data, "test", recipe.backbone.channels, shorter)
        bank, queries, *_ = splits(source, test, settings.seed)
        require_same_everywhere([queries])
        if not _classified(queries):
            return None
        bank, queries = (_some(source, settings.knn_images) for source in (bank, queries))
        return cls(bank, queries, device, settings.linear_probe)

    def measure(self, backbone: nn.Module) -> dict[str, float]:
        """Accuracy in per cent, for the metrics."""
        assert isinstance(backbone, Backbone)
        kept_bank, kept_queries = self._kept
        of_bank = self._extract(backbone, self.bank, "training kNN features", kept_bank)
        of_queries = self._extract(backbone, self.queries, "test kNN features", kept_queries)
        features = Features.of(self.bank, of_bank, self.queries, of_queries)
        numbers = {f"knn_{name}": value for name, value in knn_accuracy(features, KnnConfig()).items()}
        if self.linear_probe:
            found = linear.probe(features, QUICK, self.device)
            numbers |= {f"linear_{name}": found[name] for name in ("top1", "top5")}
        return numbers

    def _extract(self, backbone: Backbone, source: Source, label: str, kept: KeptBatches) -> Extracted:
        return extract(backbone, source, self.device, label, together=True, batches=kept)


def _some(source: Source, most: int) -> Source:
    """At equal distances, as in curves of earlier versions; but spread at random where that would miss classes, which
    take turns."""
    some = source.subset(evenly_spaced(len(source), most))
    assert source.labels is not None
    assert some.labels is not None
    missed = len(some.labels.unique()) < min(len(some), len(source.labels.unique()))
    return source.limited(most) if missed else some


def _classified(source: Source) -> bool:
    return source.labels is not None and source.labels.ndim == 1
