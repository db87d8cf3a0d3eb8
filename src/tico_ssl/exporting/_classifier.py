"""A classifier as a network to export: from images to logits."""

from pathlib import Path

from torch import nn

from tico_ssl.classifying.storage import load_classifier
from tico_ssl.networks.backbones import Backbone


class WithHead(Backbone):
    """A backbone whose outputs are the logits of classes."""

    classes: tuple[str, ...]


def load_with_head(place: Path) -> WithHead:
    """The classifier of a folder or file."""
    model = load_classifier(place)
    base = model.backbone
    network = nn.Sequential(base.network, model.head)
    whole = WithHead(network, base.config, base.image_size, base.mean, base.std, base.limits)
    whole.classes = model.classes
    return whole.eval()


def output_of(backbone: Backbone) -> str:
    """What comes out of a network."""
    return "logits" if isinstance(backbone, WithHead) else "features"
