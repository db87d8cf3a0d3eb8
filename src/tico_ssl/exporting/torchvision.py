"""torchvision: a state dict (.pth) with torchvision's names, for `torchvision.models`."""

from pathlib import Path

from tico_ssl.exporting._state_dict import write_state_dict
from tico_ssl.networks.backbones import Backbone, torchvision_arguments


def write(backbone: Backbone, out: Path) -> str:
    """Everything but the classifier, which was never trained."""
    model = backbone.config.name.partition("/")[2]
    arguments = torchvision_arguments(model, backbone.config, backbone.image_size)
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    setup = ["import torch, torchvision", f"model = torchvision.models.{model}({written})"]
    return write_state_dict(backbone, out, "torchvision", setup, strict=False)
