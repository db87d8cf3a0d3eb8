"""The stem of a ResNet: its first convolution and max-pool, or a 3 x 3 convolution alone for small images."""

from typing import Any

from torch import nn

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

SMALL_STEM = 48  # pixels, of the largest images for which a ResNet's stem keeps the full resolution by itself
COARSE = 96  # pixels, below which a ResNet with the usual stem ends with maps of three pixels a side or fewer


def has_stem(network: Any) -> bool:
    """Whether this is a ResNet with one convolution and a max-pool before its blocks."""
    return isinstance(getattr(network, "conv1", None), nn.Conv2d) and hasattr(network, "maxpool")


def has_small_stem(network: Any) -> bool:
    """Whether a ResNet's stem keeps the resolution of small images, which no library builds by itself."""
    return isinstance(getattr(network, "maxpool", None), nn.Identity)


def adapt_stem(network: Any, config: BackboneConfig, image_size: int) -> None:
    """Give a ResNet the stem for small images if the configuration, or the size of the images, asks for it."""
    if not has_stem(network):
        if config.stem == "small":
            raise UserError(f"backbone.stem=small needs a ResNet with one convolution as stem, not '{config.name}'")
        return
    if config.stem == "small" or (config.stem == "auto" and image_size <= SMALL_STEM):
        network.conv1 = like(network.conv1, kernel_size=3, stride=1, padding=config.stem_padding)
        network.maxpool = nn.Identity()


def coarse_stem(network: Any, image_size: int) -> str:
    """What the other stem would do for images between small and large ones, in words; empty for others."""
    if not has_stem(network) or has_small_stem(network) or image_size >= COARSE:
        return ""
    ends = f"the last maps are {counted(-(-image_size // 32), 'pixel')} wide and high"
    return f"{ends}; with backbone.stem=small {-(-image_size // 8)}: finer features, for up to 16 times the arithmetic"


def like(convolution: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """A new convolution with the settings of another, apart from the changes."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    settings = {name: getattr(convolution, name) for name in names} | {"bias": convolution.bias is not None} | changes
    fresh = nn.Conv2d(**settings)
    initialise(fresh)
    return fresh


def initialise(convolution: nn.Conv2d) -> None:
    """Draw the weights as torchvision does for its ResNets."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
