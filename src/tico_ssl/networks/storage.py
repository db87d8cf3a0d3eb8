"""A backbone on disk: a safetensors file with the library's own parameter names and, as metadata, how to rebuild it."""

import copy
import json
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tico_ssl.config.section import Section, validate
from tico_ssl.config.sections import BackboneConfig, Values
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import Backbone, build_backbone, build_network
from tico_ssl.results.run_folder import backbone_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically


def plain_state(backbone: Backbone) -> dict[str, Tensor]:
    """The network's state dict with weight standardisation folded in, loadable by other libraries."""
    network = weight_standardisation.bake(copy.deepcopy(backbone.network))
    return {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}


def save_backbone(backbone: Backbone, path: Path) -> None:
    """Write the file atomically."""
    # Folded weights belong to a network without standardisation.
    config = backbone.config.model_copy(update={"weight_standardisation": False})
    description = {
        "config": config.model_dump(mode="json"),
        "image_size": backbone.image_size,
        "mean": backbone.mean,
        "std": backbone.std,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as temporary:
        save_file(plain_state(backbone), temporary, metadata={"tico_ssl": json.dumps(description)})


def load_backbone(source: str | Path) -> Backbone:
    """The backbone of a run folder or a .safetensors file, in evaluation mode: normalised images to features."""
    path = backbone_file(source)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or not a safetensors file ({error})") from error
    if "tico_ssl" not in metadata:
        raise UserError(f"{path}: has no metadata about its architecture; it was not written by tico")
    try:
        description = json.loads(metadata["tico_ssl"])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, its metadata cannot be read") from error
    about = validate(Description, description, f"{path}: metadata")
    _require_match(path, about, state)
    backbone = build_backbone(about.config, about.image_size, about.mean, about.std)
    backbone.network.load_state_dict(state)
    return backbone.eval()


class Description(Section):
    """How to rebuild a network: the metadata of its file, which may come from anyone."""

    config: BackboneConfig
    image_size: Annotated[int, Field(ge=1, le=4096)]
    mean: Values
    std: Values


def _require_match(path: Path, about: Description, state: dict[str, Tensor]) -> None:
    """Compare the file's tensors with those of the network that it describes, before memory is taken for that."""
    with torch.device("meta"):
        wanted = build_network(about.config, about.image_size).state_dict()
    same = wanted.keys() == state.keys() and all(wanted[name].shape == value.shape for name, value in state.items())
    if not same or len(about.mean) != about.config.channels or len(about.std) != about.config.channels:
        raise UserError(f"{path}: its weights do not match its own metadata, '{about.config.name}'")
