"""A trained network for images of another size: position embeddings of transformers are interpolated."""

from typing import Any

from torch import nn

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks.backbones import Backbone, build_network
from tico_ssl.networks.stems import has_small_stem, has_stem
from tico_ssl.runtime.errors import UserError


def resized(backbone: Backbone, image_size: int) -> Backbone:
    """The same weights for images of another size. A network that takes any size stays as it is."""
    if image_size == backbone.image_size:
        return backbone
    config = _for_size(backbone, image_size)
    network = _fitted(backbone, config, image_size)
    return Backbone(network, config, image_size, backbone.mean, backbone.std, backbone.limits).train(backbone.training)


def _for_size(backbone: Backbone, image_size: int) -> BackboneConfig:
    """The configuration that rebuilds the network at its new size; the stem stays that of the size in training."""
    config = backbone.config
    sizes = {key: image_size for key in ("img_size", "image_size") if key in config.arguments}
    stem = config.stem
    if stem == "auto" and has_stem(backbone.network):
        stem = "small" if has_small_stem(backbone.network) else "standard"
    return config.model_copy(update={"stem": stem, "arguments": config.arguments | sizes})


def _fitted(backbone: Backbone, config: BackboneConfig, image_size: int) -> nn.Module:
    network: Any = backbone.network
    try:
        if hasattr(network, "set_input_size"):  # timm's transformers interpolate their position embeddings themselves
            network.set_input_size(img_size=(image_size, image_size))
        elif config.name.startswith("torchvision/vit_"):
            return _interpolated(network, config, image_size)
    except Exception as error:  # of many kinds, for sizes that patches or windows do not fill
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"backbone '{config.name}' does not take images of {image_size} pixels: {reason}") from error
    return backbone.network


def _interpolated(network: Any, config: BackboneConfig, image_size: int) -> nn.Module:
    from torchvision.models.vision_transformer import interpolate_embeddings

    fresh = build_network(config, image_size)
    fresh.load_state_dict(interpolate_embeddings(image_size, network.patch_size, network.state_dict()))
    return fresh
