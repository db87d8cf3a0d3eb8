"""The block classes of torchvision's and timm's networks. Neither library is imported for them: whoever built a network
has done so, and before that there are no blocks to find."""

import sys

from torch import nn


def residual_blocks() -> tuple[type[nn.Module], ...]:
    """Of ResNets."""
    names = ("BasicBlock", "Bottleneck")
    return (*_loaded("torchvision.models.resnet", *names), *_loaded("timm.models.resnet", *names))


def transformer_blocks() -> tuple[type[nn.Module], ...]:
    """Of vision transformers."""
    return (
        *_loaded("torchvision.models.vision_transformer", "EncoderBlock"),
        *_loaded("timm.models.vision_transformer", "Block"),
    )


def _loaded(module: str, *names: str) -> tuple[type[nn.Module], ...]:
    loaded = sys.modules.get(module)
    return () if loaded is None else tuple(getattr(loaded, name) for name in names)
