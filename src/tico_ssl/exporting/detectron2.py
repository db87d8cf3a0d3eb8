"""detectron2: a ResNet under detectron2's names (.pkl), for MODEL.WEIGHTS. The format is a pickle."""

import pickle
import re
from pathlib import Path
from typing import NamedTuple

from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.stems import has_small_stem
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

OUT = "backbone.pkl"
FORMATS = {1: '"L"', 3: '"RGB"'}  # of images that detectron2 reads by itself

# From the names of torchvision and timm to detectron2's, in this order.
NAMES = (
    (r"^(?!layer)", "stem."),
    (r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}"),
    (r"\bbn(\d)\b", r"conv\1.norm"),
    (r"\bdownsample\.0\b", "shortcut"),
    (r"\bdownsample\.1\b", "shortcut.norm"),
)


class Shape(NamedTuple):
    """A ResNet, as detectron2 describes it."""

    depth: int
    groups: int = 1
    width_per_group: int = 64


SHAPES = {
    **{f"resnet{depth}": Shape(depth) for depth in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": Shape(50, 32, 4),
    "resnext101_32x8d": Shape(101, 32, 8),
    "resnext101_64x4d": Shape(101, 64, 4),
    "wide_resnet50_2": Shape(50, 1, 128),
    "wide_resnet101_2": Shape(101, 1, 128),
}


def write(backbone: Backbone, out: Path) -> str:
    """Everything up to the last residual block, as numpy arrays."""
    shape = _shape(backbone)
    arrays = {detectron2_name(name): value.numpy() for name, value in plain_state(backbone).items()}
    kept = {name: value for name, value in arrays.items() if not name.endswith("num_batches_tracked")}
    content = {"model": kept, "__author__": "tico-ssl", "matching_heuristics": True}
    with written_atomically(out) as temporary, temporary.open("wb") as file:
        pickle.dump(content, file)
    return "\n".join(_snippet(backbone, shape, out))


def detectron2_name(name: str) -> str:
    """detectron2's name of a parameter of torchvision's or timm's ResNets."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _shape(backbone: Backbone) -> Shape:
    """The ResNet that detectron2 is to build, if it can."""
    library, _, model = backbone.config.name.partition("/")
    shape = None if library == "tico" or backbone.config.arguments else SHAPES.get(model.partition(".")[0])
    if shape is None:
        raise UserError(
            f"the backbone is '{backbone.config.name}', and detectron2 has ResNets only (resnet50, resnext50_32x4d, "
            "...); safetensors, onnx and torch-export can take it"
        )
    if has_small_stem(backbone.network):
        raise UserError(
            "detectron2's ResNets have the usual stem, and this one has that for small images; safetensors, onnx and "
            "torch-export can take it"
        )
    return shape


def _snippet(backbone: Backbone, shape: Shape, out: Path) -> list[str]:
    channels = backbone.config.channels
    lines = [
        "from detectron2.config import get_cfg",
        "cfg = get_cfg()  # merge your detector's config into it, then:",
        f"cfg.MODEL.WEIGHTS = {str(out)!r}  # a pickle, as this format is: load only those that you made",
        f"cfg.MODEL.PIXEL_MEAN = {[round(255 * value, 6) for value in backbone.mean]}",
        f"cfg.MODEL.PIXEL_STD = {[round(255 * value, 6) for value in backbone.std]}",
    ]
    if channels in FORMATS:
        lines.append(f"cfg.INPUT.FORMAT = {FORMATS[channels]}  # the order of channels that it was trained on")
    else:
        lines.append(f"# images of {channels} channels need a DatasetMapper of your own")
    lines += [
        f"cfg.MODEL.RESNETS.DEPTH = {shape.depth}",
        f"cfg.MODEL.RESNETS.NUM_GROUPS = {shape.groups}",
        f"cfg.MODEL.RESNETS.WIDTH_PER_GROUP = {shape.width_per_group}",
        "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False  # the stride is in the 3 x 3 convolution",
    ]
    if shape.depth < 50:
        lines.append("cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64")
    return lines
