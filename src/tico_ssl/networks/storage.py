"""A backbone on disk: a safetensors file with the library's own parameter names and, as metadata, how to rebuild it."""

import copy
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import Backbone, build_backbone
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
        temporary.write_bytes(save(plain_state(backbone), metadata={"tico_ssl": json.dumps(description)}))


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
    description = json.loads(metadata["tico_ssl"])
    config = BackboneConfig.model_validate(description["config"])
    backbone = build_backbone(config, description["image_size"], description["mean"], description["std"])
    try:
        backbone.network.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{path}: its weights do not match its own metadata, '{config.name}'") from error
    return backbone.eval()
