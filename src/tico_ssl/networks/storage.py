"""A backbone on disk: a safetensors file with the library's own parameter names and, as metadata, how to rebuild it."""

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tico_ssl.config.section import Section, validate
from tico_ssl.config.sections import FOUND, BackboneConfig, Deviations, Means, Range, as_lists, limits_of
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import Backbone, build_backbone, build_network
from tico_ssl.networks.resizing import resized
from tico_ssl.networks.stems import has_small_stem, has_stem
from tico_ssl.results.run_folder import backbone_file
from tico_ssl.runtime.checksums import checksums, damage
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.progress import say

ENTRY = "tico_ssl"  # of the file's metadata
EARLY = {"config", "image_size", "mean", "std"}  # all that was in it before there were checksums
EARLY_SMALL_STEM = 64  # pixels, of the largest images that had the small stem by themselves before
REMEDY = "`tico pretrain --resume` writes the backbone of a run again"
_unverified: set[Path] = set()  # files of which this was said


def plain_state(backbone: Backbone) -> dict[str, Tensor]:
    """The network's state dict with weight standardisation folded in, loadable by other libraries."""
    network = weight_standardisation.bake(copy.deepcopy(backbone.network))
    return {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}


def save_backbone(backbone: Backbone, path: Path) -> None:
    """Write the file atomically, with a checksum of every tensor."""
    write_described(path, plain_state(backbone), described(backbone))


def load_backbone(source: str | Path, image_size: int | None = None) -> Backbone:
    """The backbone of `source`, a run folder or a .safetensors file, in evaluation mode, on the CPU: normalised images
    to features. For images of another size than in training (`image_size`, in pixels), position embeddings of
    transformers are interpolated.

        backbone = load_backbone("runs/mine")
        with torch.no_grad():
            features = backbone(backbone.preprocess(["a.jpg", "b.png"]))  # (2, backbone.width)
    """
    path = backbone_file(source)
    state, about = described_state(path)
    return resized(rebuilt(path, about, state), about.image_size if image_size is None else image_size)


def described_state(path: Path) -> tuple[dict[str, Tensor], "Description"]:
    """The verified tensors of a backbone file, and the network that they belong to."""
    state, description = read_described(path)
    about = _with_its_stem(validate(Description, description, f"{path}: metadata"), state)
    _require_match(path, about, state)
    return state, about


def _with_its_stem(about: "Description", state: dict[str, Tensor]) -> "Description":
    """Where a description leaves a ResNet's stem to a rule, which was another one in earlier versions, the weights say
    which it is."""
    first = state.get("conv1.weight")
    if about.config.stem != "auto" or about.image_size > EARLY_SMALL_STEM or first is None or first.shape[-1] != 3:
        return about
    with torch.device("meta"):
        network = build_network(about.config, about.image_size)
    if not has_stem(network) or has_small_stem(network):
        return about
    return about.model_copy(update={"config": about.config.model_copy(update={"stem": "small"})})


def is_ours(path: Path) -> bool:
    """Whether this is a backbone file, rather than another safetensors file or none."""
    try:
        with safe_open(path, framework="pt") as file:
            return ENTRY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def holds(path: Path, backbone: Backbone) -> bool:
    """Whether this file is that of this backbone, and undamaged."""
    try:
        state, description = read_described(path)
        description["config"] = BackboneConfig.model_validate(description["config"]).model_dump(mode="json")
    except (ValueError, OSError):  # also a UserError
        return False
    return checksums([state, description]) == checksums([plain_state(backbone), described(backbone)])


def described(backbone: Backbone) -> dict[str, Any]:
    """How to rebuild the network of the file."""
    # Folded weights belong to a network without standardisation.
    config = backbone.config.model_copy(update={"weight_standardisation": False})
    return {
        "config": config.model_dump(mode="json"),
        "image_size": backbone.image_size,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    } | ({} if backbone.limits is None else {"range": as_lists(backbone.limits)})


def write_described(path: Path, state: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write tensors and the description of their network atomically, with a checksum of each."""
    # All in one entry: their order in the file is a matter of chance.
    about = description | {"checksums": checksums([state, description])}
    content = save(state, metadata={ENTRY: json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(path) as temporary:
        temporary.write_bytes(content)


def read_described(path: Path, again: str = REMEDY) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and the description of their network, if they are as they were written; `again` says how to
    write the file anew."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise UserError(f"{path}: damaged or not a safetensors file ({error})") from error
    if ENTRY not in metadata:
        raise UserError(f"{path}: has no metadata about its architecture; it was not written by tico")
    early = False
    try:
        description: dict[str, Any] = json.loads(metadata[ENTRY])
        manifest = description.pop("checksums", None)
        early = manifest is None and description.keys() == EARLY
        wrong = None if early else damage([state, description], manifest)
    except (ValueError, TypeError, AttributeError, RecursionError):
        wrong = "its metadata cannot be read"
    if wrong is not None:
        raise UserError(f"{path}: damaged, {wrong}; {again}")
    if early and path not in _unverified:
        _unverified.add(path)
        say(f"{path} is from a version without checksums: it is used unverified")
    return state, description


class Description(Section):
    """How to rebuild a network: the metadata of its file, which may come from anyone."""

    config: BackboneConfig
    image_size: Annotated[int, Field(ge=1, le=4096)]
    mean: Means
    std: Deviations
    range: Range = FOUND


def rebuilt(path: Path, about: Description, state: dict[str, Tensor]) -> Backbone:
    """The backbone that a file describes, with its weights, in evaluation mode."""
    about = _with_its_stem(about, state)
    _require_match(path, about, state)
    backbone = build_backbone(about.config, about.image_size, about.mean, about.std, limits_of(about.range))
    backbone.network.load_state_dict(state)
    return backbone.eval()


def _require_match(path: Path, about: Description, state: dict[str, Tensor]) -> None:
    """Compare the file's tensors with those of the network that it describes, before memory is taken for that."""
    with torch.device("meta"):
        wanted = build_network(about.config, about.image_size).state_dict()
    same = wanted.keys() == state.keys() and all(wanted[name].shape == value.shape for name, value in state.items())
    limits = limits_of(about.range)
    pairs = len(limits) if limits is not None and isinstance(limits[0], tuple) else about.config.channels
    if not same or {len(about.mean), len(about.std), pairs} != {about.config.channels}:
        raise UserError(f"{path}: its weights do not match its own metadata, '{about.config.name}'")
