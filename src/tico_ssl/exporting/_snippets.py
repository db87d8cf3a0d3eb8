"""Lines of Python that build a network in its own library and load weights into it."""

from pathlib import Path

import torch
from torch import nn

from tico_ssl.networks.backbones import Backbone, has_small_stem, timm_arguments, torchvision_arguments
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.files import written_atomically


def write_state_dict(backbone: Backbone, out: Path) -> str:
    """Write a state dict under the library's own names; return the lines that build the same network and load it."""
    with written_atomically(out) as temporary, temporary.open("wb") as file:
        torch.save(plain_state(backbone), file)
    return "\n".join(loading(backbone, f"torch.load({str(out)!r})"))


def loading(backbone: Backbone, state: str) -> list[str]:
    """Lines that build the network as it was trained, and load an expression for its state dict."""
    library, _, model = backbone.config.name.partition("/")
    lines, rest = ["import torch", f"import {library}"], ")"
    if library == "timm":
        arguments = timm_arguments(model, backbone.config, backbone.image_size)
        written = "".join(f", {key}={value!r}" for key, value in arguments.items())
        lines.append(f"model = timm.create_model({model!r}{written})")
    else:
        arguments = torchvision_arguments(model, backbone.config, backbone.image_size)
        written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        lines.append(f"model = torchvision.models.{model}({written})")
        rest = ", strict=False)  # all but the classifier"
    return [
        *lines,
        *_stem(backbone, library),
        f"model.load_state_dict({state}{rest}",
        f"model.eval()  # {about_input(backbone)}",
    ]


def _stem(backbone: Backbone, library: str) -> list[str]:
    """Lines for what the library's constructor has no argument for."""
    small = has_small_stem(backbone.network)
    if not small and (library == "timm" or backbone.config.channels == 3):
        return []
    name, first = next((n, m) for n, m in backbone.network.named_modules() if isinstance(m, nn.Conv2d))
    sizes = (first.in_channels, first.out_channels, first.kernel_size, first.stride, first.padding)
    place = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
    written = f"{', '.join(map(str, sizes))}, bias={first.bias is not None}"
    line = f"model{place} = torch.nn.Conv2d({written})  # the stem as trained"
    return [line, "model.maxpool = torch.nn.Identity()"] if small else [line]


def about_input(backbone: Backbone) -> str:
    """What the network takes, for a comment."""
    mean, std = list(backbone.mean), list(backbone.std)
    return f"takes (N, {shape_of(backbone)}) of (pixels / 255 - mean) / std, mean {mean}, std {std}"


def shape_of(backbone: Backbone) -> str:
    """Channels, height and width of the input, as in code."""
    return f"{backbone.config.channels}, {backbone.image_size}, {backbone.image_size}"
