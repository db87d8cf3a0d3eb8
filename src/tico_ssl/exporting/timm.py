"""timm: a state dict (.pth) with timm's names, for `timm.create_model(..., num_classes=0)`."""

from pathlib import Path

from tico_ssl.exporting import write_state_dict
from tico_ssl.networks.backbones import Backbone


def write(backbone: Backbone, out: Path) -> str:
    """The whole model without its classifier."""
    model = backbone.config.name.partition("/")[2]
    arguments = "".join(f", {key}={value!r}" for key, value in backbone.config.arguments.items())
    channels = "" if backbone.config.channels == 3 else f", in_chans={backbone.config.channels}"
    setup = ["import timm, torch", f"model = timm.create_model({model!r}, num_classes=0{channels}{arguments})"]
    return write_state_dict(backbone, out, "timm", setup, strict=True)
