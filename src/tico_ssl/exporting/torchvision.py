"""torchvision: a state dict (.pth) with torchvision's names, for `torchvision.models`."""

from pathlib import Path

from tico_ssl.exporting import write_state_dict
from tico_ssl.networks.backbones import Backbone


def write(backbone: Backbone, out: Path) -> str:
    """Everything but the classifier, which was never trained."""
    model = backbone.config.name.partition("/")[2]
    setup = ["import torch, torchvision", f"model = torchvision.models.{model}()"]
    return write_state_dict(backbone, out, "torchvision", setup, strict=False)
