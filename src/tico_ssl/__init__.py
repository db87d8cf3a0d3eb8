"""TiCo: self-supervised pretraining of vision backbones, from a folder of images to an evaluated model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tico_ssl.evaluations import evaluate
    from tico_ssl.exporting import export
    from tico_ssl.features import embed
    from tico_ssl.methods.tico import TiCo, TiCoLoss, tico_loss
    from tico_ssl.networks.storage import load_backbone
    from tico_ssl.optim.lars import LARS
    from tico_ssl.studies import study
    from tico_ssl.training.pretrain import pretrain

__all__ = [
    "LARS",
    "TiCo",
    "TiCoLoss",
    "embed",
    "evaluate",
    "export",
    "load_backbone",
    "pretrain",
    "study",
    "tico_loss",
]

# Loaded when first asked for: `tico --help` need not wait four seconds for torch.
_HOMES = {
    "LARS": "optim.lars",
    "TiCo": "methods.tico",
    "TiCoLoss": "methods.tico",
    "embed": "features",
    "evaluate": "evaluations",
    "export": "exporting",
    "load_backbone": "networks.storage",
    "pretrain": "training.pretrain",
    "study": "studies",
    "tico_loss": "methods.tico",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tico_ssl' has no attribute {name!r}")
    value = getattr(import_module(f"tico_ssl.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
