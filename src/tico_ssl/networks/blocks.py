"""The blocks that the libraries' networks are made of. timm is not imported for its own: a network of timm has done so,
and without one there are none to find."""

import sys

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock


def residual_blocks() -> tuple[type[nn.Module], ...]:
    """Of ResNets."""
    return (BasicBlock, Bottleneck, *_of_timm("resnet", "BasicBlock", "Bottleneck"))


def transformer_blocks() -> tuple[type[nn.Module], ...]:
    """Of vision transformers."""
    return (EncoderBlock, *_of_timm("vision_transformer", "Block"))


def _of_timm(module: str, *names: str) -> tuple[type[nn.Module], ...]:
    loaded = sys.modules.get(f"timm.models.{module}")
    return () if loaded is None else tuple(getattr(loaded, name) for name in names)
