"""A backbone as a graph of operations, which needs no code of its own to run."""

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tico_ssl.config.sections import as_lists
from tico_ssl.exporting._agreement import normal_images
from tico_ssl.exporting._classifier import WithHead
from tico_ssl.exporting._snippets import about_input, shape_of
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.fallbacks import reason_of

RESIZING = "cutting and resizing stay outside"  # antialiased bicubic, which no exported operation computes exactly


class Whole(nn.Module):
    """A network with the normalisation of its input, if that is inside."""

    mean: Tensor
    scale: Tensor

    def __init__(self, backbone: Backbone, preprocessing: str) -> None:
        super().__init__()
        self.network = copy.deepcopy(backbone.network).requires_grad_(False)
        self.preprocessing = preprocessing
        unit = 255.0 if preprocessing == "inside" else 1.0
        self.register_buffer("mean", unit * torch.tensor(backbone.mean).view(-1, 1, 1))
        self.register_buffer("scale", 1 / (unit * torch.tensor(backbone.std).view(-1, 1, 1)))

    def forward(self, images: Tensor) -> Tensor:
        """Features of images."""
        if self.preprocessing != "outside":
            images = (images.float() - self.mean) * self.scale
        features: Tensor = self.network(images)
        return features


def random_images(backbone: Backbone, preprocessing: str) -> Callable[[int], Tensor]:
    """Batches of what the graph takes."""
    normal = normal_images(backbone.config.channels, backbone.image_size)
    if preprocessing == "outside":
        return normal
    pixels = 255 if preprocessing == "inside" else 1
    dtype = torch.uint8 if preprocessing == "inside" else torch.float32
    return lambda count: (pixels * normal(count).sigmoid()).to(dtype)


def traced(whole: Whole, images: Tensor) -> ExportedProgram:
    """The graph, for batches of any size."""
    try:
        with torch.no_grad():
            return torch.export.export(whole.eval(), (images,), dynamic_shapes=({0: Dim("batch", min=1)},))
    except Exception as error:  # a network may do what no graph can
        raise UserError(f"the network cannot be exported as a graph: {reason_of(error)}") from error


def about(backbone: Backbone, preprocessing: str) -> dict[str, str]:
    """What a user of the file must know, as metadata: JSON by name."""
    values: dict[str, Any] = {
        "architecture": backbone.config.name,
        "input_size": [backbone.config.channels, backbone.image_size, backbone.image_size],
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "preprocessing": preprocessing,
    }
    if backbone.limits is not None:
        values["range"] = as_lists(backbone.limits)
    if isinstance(backbone, WithHead):
        values["classes"] = list(backbone.classes)
    return {key: json.dumps(value) for key, value in values.items()}


def input_comment(backbone: Backbone, preprocessing: str) -> str:
    """What the graph takes, for a comment."""
    if preprocessing == "outside":
        return about_input(backbone)
    values = "pixels from 0 to 255" if preprocessing == "inside" else "values from 0 to 1"
    return f"takes (N, {shape_of(backbone)}), {values}; they are normalised inside, {RESIZING}"
