"""SimSiam with the details of lightly's CIFAR-10 benchmark that this package has otherwise, each by a setting, to find
which of them its accuracy depends on. A method out of the package, used by its import path:

    python -m tico_ssl pretrain cifar10/simsiam-lightly --data cifar10.npz method.name=benchmarks.lightly_simsiam \
        method.default_init=true method.stem_relu=false
"""

from torch import nn

from tico_ssl.methods import simsiam
from tico_ssl.methods.simsiam import SimSiam
from tico_ssl.networks.backbones import Backbone


class Config(simsiam.Config):
    """The package's SimSiam, unless a setting says otherwise."""

    name: str = "benchmarks.lightly_simsiam"
    """SimSiam with details of lightly's benchmark."""
    default_init: bool = False
    """Convolutions start from PyTorch's default (uniform, variance 1 / (3 fan-in)) instead of torchvision's."""
    stem_relu: bool = True
    """A ReLU follows the first BatchNorm."""


def build(config: Config, backbone: Backbone) -> SimSiam:
    """SimSiam of a recipe."""
    if config.default_init:
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()
    if not config.stem_relu:
        backbone.network.relu = nn.Identity()
    return SimSiam(backbone, config=config)
