"""onnx: a graph (.onnx) for batches of any size, checked with ONNX Runtime when it is written."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tico_ssl.exporting._agreement import agreement
from tico_ssl.exporting._classifier import output_of
from tico_ssl.exporting._graph import Whole, about, input_comment, random_images, traced
from tico_ssl.exporting._snippets import assembled, reading, shape_of
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.fallbacks import reason_of
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.progress import say

OUT = "backbone.onnx"
NEEDS = ("onnx", "onnxscript", "onnxruntime")
OPTIONS = ("preprocessing",)
LARGEST = 2**31 - 2**24  # bytes of weights in one file, whose format ends at 2 GiB


def write(backbone: Backbone, out: Path, preprocessing: str = "outside") -> str:
    """One file, which must give the network's features in ONNX Runtime."""
    whole, images = Whole(backbone, preprocessing), random_images(backbone, preprocessing)
    if sum(value.nbytes for value in whole.state_dict().values()) > LARGEST:
        raise UserError("an ONNX file holds at most 2 GiB, less than this network; torch-export can take it")
    program = _converted(whole, images(2), output_of(backbone))
    program.model.metadata_props.update(about(backbone, preprocessing))
    with written_atomically(out) as temporary:
        program.save(str(temporary), external_data=False)
        found = agreement(whole, _in_runtime(temporary), images)
        if not found:
            raise UserError(f"ONNX Runtime computes other features than PyTorch: {found}; nothing was written")
    say(f"checked with ONNX Runtime against PyTorch: {found}")
    dtype, output = "uint8" if preprocessing == "inside" else "float32", output_of(backbone)
    return assembled(
        [
            "import numpy",
            "import onnxruntime",
            f"session = onnxruntime.InferenceSession({str(out)!r})",
            "about = session.get_modelmeta().custom_metadata_map  # architecture, input_size, mean, std, any classes",
            *reading(backbone, preprocessing, "numpy.ascontiguousarray"),
            f"images = numpy.zeros((1, {shape_of(backbone)}), numpy.{dtype})  # or preprocess('photo.jpg')",
            f"({output},) = session.run(None, {{'images': images}})  # {input_comment(backbone, preprocessing)}",
        ]
    )


def _converted(whole: Whole, images: Tensor, output: str) -> Any:
    program = traced(whole, images)
    try:
        return torch.onnx.export(
            program,
            (images,),
            dynamo=True,
            input_names=["images"],
            output_names=[output],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
        )
    except Exception as error:  # an operation that ONNX does not have
        raise UserError(f"the network cannot be exported to ONNX: {reason_of(error)}") from error


def _in_runtime(file: Path) -> Callable[[Tensor], Tensor]:
    session = import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
