"""timm: a state dict (.pth) with timm's names, for `timm.create_model(..., num_classes=0)`."""

from pathlib import Path

from tico_ssl.exporting._counterparts import in_library
from tico_ssl.exporting._snippets import write_state_dict
from tico_ssl.networks.backbones import Backbone


def write(backbone: Backbone, out: Path) -> str:
    """The whole model without its classifier; one of torchvision under timm's names, where both have it."""
    return write_state_dict(in_library(backbone, "timm"), out)
