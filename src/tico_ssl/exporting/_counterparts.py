"""The same network in the other of torchvision and timm, with the same weights under that library's names."""

import re
from collections.abc import Iterable

from tico_ssl.exporting._agreement import agreement, normal_images
from tico_ssl.networks import backbones
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.storage import plain_state
from tico_ssl.runtime.errors import UserError

# timm's names of torchvision's models; most others have the same.
TIMM_MODELS = {
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
    "vit_l_32": "vit_large_patch32_224",
}
TORCHVISION_MODELS = {theirs: ours for ours, theirs in TIMM_MODELS.items()}

# From torchvision's names of parameters to timm's, in this order; those of ResNets are the same.
VIT = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
)
CONVNEXT = (
    (r"^classifier\.0\.", "head.norm."),
    (r"^features\.0\.0\.", "stem.0."),
    (r"^features\.0\.1\.", "stem.1."),
    *((rf"^features\.{2 * stage}\.(\d)\.", rf"stages.{stage}.downsample.\1.") for stage in (1, 2, 3)),
    *((rf"^features\.{2 * stage + 1}\.(\d+)\.", rf"stages.{stage}.blocks.\1.") for stage in (0, 1, 2, 3)),
    (r"\.block\.0\.", ".conv_dw."),
    (r"\.block\.2\.", ".norm."),
    (r"\.block\.3\.", ".mlp.fc1."),
    (r"\.block\.5\.", ".mlp.fc2."),
    (r"\.layer_scale$", ".gamma"),
)
RULES = {"vit_": VIT, "convnext_": CONVNEXT}


def in_library(backbone: Backbone, library: str) -> Backbone:
    """The backbone as a model of this library, which must be the same function: features are compared."""
    own, _, model = backbone.config.name.partition("/")
    if own == library:
        return backbone
    table = TIMM_MODELS if library == "timm" else TORCHVISION_MODELS
    name = f"{library}/{table.get(model.partition('.')[0], model.partition('.')[0])}"
    if own == "tico" or backbone.config.arguments or name not in backbones.catalogue(library):
        raise _no_counterpart(backbone, library)
    config = backbone.config.model_copy(update={"name": name, "weight_standardisation": False})
    other = build_backbone(config, backbone.image_size, backbone.mean, backbone.std, backbone.limits).eval()
    if not _copy_weights(backbone, other, library):
        raise _no_counterpart(backbone, library)
    if not agreement(backbone, other, normal_images(config.channels, backbone.image_size)):
        raise _no_counterpart(backbone, library)
    return other


def _copy_weights(backbone: Backbone, other: Backbone, library: str) -> bool:
    """Whether every weight of the one has its place in the other."""
    state, wanted = plain_state(backbone), other.network.state_dict()
    torchvision_names, model = (state, backbone) if library == "timm" else (wanted, other)
    pairs = timm_names(model.config.name.partition("/")[2], torchvision_names)
    sources = {theirs: ours for ours, theirs in pairs.items()} if library == "timm" else pairs
    if sources.keys() != wanted.keys() or set(sources.values()) != state.keys():
        return False
    if any(wanted[name].squeeze().shape != state[source].squeeze().shape for name, source in sources.items()):
        return False
    other.network.load_state_dict({name: state[source].view(wanted[name].shape) for name, source in sources.items()})
    return True


def timm_names(model: str, names: Iterable[str]) -> dict[str, str]:
    """timm's name of every parameter of a torchvision model."""
    rules = next((rules for family, rules in RULES.items() if model.startswith(family)), ())
    renamed = {}
    for name in names:
        theirs = name
        for pattern, replacement in rules:
            theirs = re.sub(pattern, replacement, theirs)
        renamed[name] = theirs
    return renamed


def _no_counterpart(backbone: Backbone, library: str) -> UserError:
    own = backbone.config.name.partition("/")[0]
    others = ["safetensors", "onnx", "torch-export"]
    formats = ", ".join(others if own == "tico" else [own, *others])
    return UserError(f"the backbone is '{backbone.config.name}', which {library} cannot build; {formats} can take it")
