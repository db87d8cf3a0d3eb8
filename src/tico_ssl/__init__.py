"""TiCo: self-supervised pretraining of vision backbones, from a folder of images to an evaluated model."""

from tico_ssl.evaluations import evaluate
from tico_ssl.exporting import export
from tico_ssl.features import embed
from tico_ssl.methods.tico import TiCo, TiCoLoss, tico_loss
from tico_ssl.networks.storage import load_backbone
from tico_ssl.optim import LARS
from tico_ssl.training.pretrain import pretrain

__all__ = ["LARS", "TiCo", "TiCoLoss", "embed", "evaluate", "export", "load_backbone", "pretrain", "tico_loss"]
