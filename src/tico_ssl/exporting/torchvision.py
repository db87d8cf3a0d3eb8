"""torchvision: a state dict (.pth) with torchvision's names, for `torchvision.models`."""

from pathlib import Path

from tico_ssl.exporting._counterparts import in_library
from tico_ssl.exporting._snippets import write_state_dict
from tico_ssl.networks.backbones import Backbone


def write(backbone: Backbone, out: Path) -> str:
    """Everything but the classifier, which was never trained; one of timm under torchvision's names, where both have
    it."""
    return write_state_dict(in_library(backbone, "torchvision"), out)
