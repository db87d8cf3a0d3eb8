"""torch-export: a graph (.pt2) for batches of any size, for `torch.export.load`."""

import io
import json
import warnings
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from tico_ssl.exporting._agreement import agreement
from tico_ssl.exporting._classifier import output_of
from tico_ssl.exporting._graph import Whole, about, input_comment, random_images, traced
from tico_ssl.exporting._snippets import assembled, reading, shape_of
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.progress import say

OUT = "backbone.pt2"
OPTIONS = ("preprocessing",)
ABOUT = "about.json"  # within the file


def write(backbone: Backbone, out: Path, preprocessing: str = "outside") -> str:
    """The graph, read back and compared with the network."""
    if out.suffix != ".pt2":
        raise UserError(f"{out}: the name must end in .pt2, by which torch.export.load knows the file")
    whole, images = Whole(backbone, preprocessing), random_images(backbone, preprocessing)
    program = traced(whole, images(2))
    content = io.BytesIO()  # given a file that cannot be written, torch ends the process
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about(backbone, preprocessing))})
    with written_atomically(out) as temporary:
        temporary.write_bytes(content.getbuffer())
        with temporary.open("rb") as file:
            found = agreement(whole, _loaded(file), images)
        if not found:
            raise UserError(f"the exported graph has other features than the network: {found}; nothing was written")
    say(f"checked against the network: {found}")
    dtype = "uint8" if preprocessing == "inside" else "float32"
    return assembled(
        [
            "import json",
            "import torch",
            f"extra = {{{ABOUT!r}: ''}}",
            f"model = torch.export.load({str(out)!r}, extra_files=extra).module()",
            f"about = json.loads(extra[{ABOUT!r}])  # architecture, input_size, mean, std, any classes",
            *reading(backbone, preprocessing, "torch.tensor"),
            f"images = torch.zeros(1, {shape_of(backbone)}, dtype=torch.{dtype})  # or preprocess('photo.jpg')",
            f"{output_of(backbone)} = model(images)  # {input_comment(backbone, preprocessing)}",
        ]
    )


def _loaded(file: BinaryIO) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11, about what it wrote itself
        return torch.export.load(file).module()
