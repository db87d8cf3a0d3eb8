"""timm: a state dict (.pth) with timm's names, for `timm.create_model(..., num_classes=0)`."""

from pathlib import Path

from tico_ssl.exporting._state_dict import write_state_dict
from tico_ssl.networks.backbones import Backbone, timm_arguments


def write(backbone: Backbone, out: Path) -> str:
    """The whole model without its classifier."""
    model = backbone.config.name.partition("/")[2]
    arguments = timm_arguments(model, backbone.config, backbone.image_size)
    written = "".join(f", {key}={value!r}" for key, value in arguments.items())
    setup = ["import timm, torch", f"model = timm.create_model({model!r}{written})"]
    return write_state_dict(backbone, out, "timm", setup, strict=True)
