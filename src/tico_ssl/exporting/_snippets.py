"""Lines of Python that build a network in its own library, load weights into it, and make its input of a picture."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from tico_ssl.config.sections import as_lists
from tico_ssl.networks.backbones import Backbone, timm_arguments, torchvision_arguments
from tico_ssl.networks.stems import has_small_stem
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.files import written_atomically
from tico_ssl.views.centre import KEPT

IMPORT = re.compile(r"(import|from) ")
MODES = {1: "L", 3: "RGB"}  # Pillow's, by number of channels


def write_state_dict(backbone: Backbone, out: Path) -> str:
    """Write a state dict under the library's own names; return the lines that build the same network and load it."""
    with written_atomically(out) as temporary, temporary.open("wb") as file:
        torch.save(plain_state(backbone), file)
    return assembled(loading(backbone, f"torch.load({str(out)!r})"))


def assembled(lines: Iterable[str]) -> str:
    """One program: imports first, each once."""
    lines = list(lines)
    imports = dict.fromkeys(line for line in lines if IMPORT.match(line))
    return "\n".join([*imports, "", *(line for line in lines if not IMPORT.match(line))])


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
        *_without_classifier(backbone, library),
        f"model.eval()  # {about_input(backbone)}",
        *reading(backbone, "outside", "torch.tensor"),
        "# features = model(preprocess('photo.jpg'))",
    ]


def _without_classifier(backbone: Backbone, library: str) -> list[str]:
    """A line for features instead of classes; timm's constructor does this itself."""
    if library == "timm":
        return []
    *_, name = (name for name, module in backbone.network.named_modules() if isinstance(module, nn.Identity))
    return [f"model{_attribute(name)} = torch.nn.Identity()  # features instead of classes"]


def reading(backbone: Backbone, preprocessing: str, wrapped: str) -> list[str]:
    """Lines that define `preprocess`: what evaluations do to a picture, by Pillow and numpy alone. Images of science
    are for their reader to open: a comment says what to do."""
    channels, size = backbone.config.channels, backbone.image_size
    if channels not in MODES or backbone.limits is not None:
        mapped = "" if backbone.limits is None else f", values mapped from {as_lists(backbone.limits)} to 0 to 255"
        square = f"the central square of {KEPT} of the shorter side, resized to {size} pixels (antialiased bicubic)"
        return [f"# of an image, take {square}{mapped}"]
    return [
        "import numpy",
        "from PIL import Image, ImageOps",
        "def preprocess(file):",
        f"    image = ImageOps.exif_transpose(Image.open(file)).convert({MODES[channels]!r})",
        f"    if image.size != ({size}, {size}):  # the central square, resized",
        f"        side = round({KEPT} * min(image.size))",
        "        left, top = (image.width - side) // 2, (image.height - side) // 2",
        "        image = image.crop((left, top, left + side, top + side))",
        f"        image = image.resize(({size}, {size}), Image.Resampling.BICUBIC)",
        f"    pixels = numpy.asarray(image).reshape(1, {size}, {size}, {channels})",
        *_normalising(backbone, preprocessing),
        f"    return {wrapped}(pixels.transpose(0, 3, 1, 2))",
    ]


def _normalising(backbone: Backbone, preprocessing: str) -> list[str]:
    """Lines from uint8 pixels to what the network takes."""
    if preprocessing == "inside":
        return []
    scaled = "    pixels = pixels.astype(numpy.float32) / 255"
    if preprocessing == "inside-float":
        return [scaled]
    mean, std = (f"numpy.float32({list(values)})" for values in (backbone.mean, backbone.std))
    return [scaled, f"    pixels = (pixels - {mean}) / {std}"]


def _stem(backbone: Backbone, library: str) -> list[str]:
    """Lines for what the library's constructor has no argument for."""
    small = has_small_stem(backbone.network)
    if not small and (library == "timm" or backbone.config.channels == 3):
        return []
    name, first = next((n, m) for n, m in backbone.network.named_modules() if isinstance(m, nn.Conv2d))
    sizes = (first.in_channels, first.out_channels, first.kernel_size, first.stride, first.padding)
    written = f"{', '.join(map(str, sizes))}, bias={first.bias is not None}"
    line = f"model{_attribute(name)} = torch.nn.Conv2d({written})  # the stem as trained"
    return [line, "model.maxpool = torch.nn.Identity()"] if small else [line]


def _attribute(name: str) -> str:
    """A module's name as an expression: .layer1[0].conv1."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))


def about_input(backbone: Backbone) -> str:
    """What the network takes, for a comment."""
    mean, std = list(backbone.mean), list(backbone.std)
    return f"takes (N, {shape_of(backbone)}) of (pixels / 255 - mean) / std, mean {mean}, std {std}"


def shape_of(backbone: Backbone) -> str:
    """Channels, height and width of the input, as in code."""
    return f"{backbone.config.channels}, {backbone.image_size}, {backbone.image_size}"
