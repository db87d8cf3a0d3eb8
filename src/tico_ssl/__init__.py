"""TiCo: self-supervised pretraining of vision backbones, from a folder of images to an evaluated model."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.classifying.storage import load_classifier
    from tico_ssl.evaluations._evaluate import evaluate
    from tico_ssl.exporting._writing import export
    from tico_ssl.features.embedding import embed
    from tico_ssl.methods.tico import TiCo, TiCoLoss, tico_loss
    from tico_ssl.networks.storage import load_backbone
    from tico_ssl.optim.lars import LARS
    from tico_ssl.studies import study
    from tico_ssl.training.start import pretrain

try:
    __version__ = version("tico-ssl")
except PackageNotFoundError:  # a copy of the folder that was never installed
    __version__ = "unknown"

__all__ = [
    "LARS",
    "TiCo",
    "TiCoLoss",
    "__version__",
    "embed",
    "evaluate",
    "export",
    "load_backbone",
    "load_classifier",
    "pretrain",
    "study",
    "tico_loss",
]

__getattr__ = lazy.attributes(
    __name__,
    {
        "LARS": "optim.lars",
        "TiCo": "methods.tico",
        "TiCoLoss": "methods.tico",
        "embed": "features.embedding",
        "evaluate": "evaluations._evaluate",
        "export": "exporting._writing",
        "load_backbone": "networks.storage",
        "load_classifier": "classifying.storage",
        "pretrain": "training.start",
        "study": "studies",
        "tico_loss": "methods.tico",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
