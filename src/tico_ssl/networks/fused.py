"""ResNets with fused BatchNorm, residual sum and ReLU on a GPU.

Only the forward functions of blocks are replaced: parameters, their names and the result stay the same, and each block
falls back to torch's modules where the kernels do not apply (float64, a CPU).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import SharedBatchNorm
from tico_ssl.networks.narrow_resnet import NarrowResNet
from tico_ssl.networks.weight_standardisation import EPSILON, StandardisedConv2d, standardise
from tico_ssl.runtime import distributed

try:
    from tico_ssl.networks import fused_kernels
except ImportError:  # Triton comes with torch on Linux only
    fused_kernels = None  # type: ignore[assignment]


class Twice(NamedTuple):
    """A block's output, once for the next block's convolutions and once for its shortcut: the two gradients are added
    inside the fused backward kernel rather than in a separate operation. `views` equal parts of the batch have their
    own BatchNorm statistics."""

    one: Tensor
    other: Tensor
    views: int = 1


SHARED = (nn.SyncBatchNorm, SharedBatchNorm)  # whose statistics are those of all processes
DEVICES = ("cuda",)  # tests add the CPU, with Triton's interpreter
JOINED_PIXELS = 2**22  # of all views together, above which one view fills a GPU


def fuse(model: nn.Module) -> nn.Module:
    """Fuse the blocks of torchvision's and this package's ResNets in place. What has another activation than ReLU, or
    none, computes as it did."""
    if fused_kernels is not None:
        for module in [module for module in model.modules() if _fusible(module)]:
            module.__class__ = FUSED[type(module)]
    return model


def _fusible(module: nn.Module) -> bool:
    """Whether the fused form computes the same. A network hands its blocks two tensors, which only fused ones take."""
    if type(module) not in FUSED:
        return False
    if isinstance(module, ResNet | NarrowResNet):
        stages = (module.layer1, module.layer2, module.layer3, module.layer4)
        blocks = [block for stage in stages for block in stage.children()]
        if not all(isinstance(block, BasicBlock | Bottleneck) and _fusible(block) for block in blocks):
            return False
    return not hasattr(module, "relu") or type(module.relu) in (nn.ReLU, nn.Identity)


def _has_relu(module: ResNet | NarrowResNet | BasicBlock | Bottleneck) -> bool:
    return isinstance(module.relu, nn.ReLU)


def norm_act(norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True, views: int = 1) -> Tensor:
    """relu(norm(x) + residual)."""
    return norm_act_twice(norm, x, residual, relu, views).one


def norm_act_twice(
    norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True, views: int = 1
) -> Twice:
    """The same, returned twice for two consumers."""
    if isinstance(norm, _BatchNorm) and type(norm) in (nn.BatchNorm2d, *SHARED) and _suits(norm, x):
        if norm.training:
            shared = type(norm) in SHARED and distributed.active()
            return Twice(*fused_kernels.norm_act(norm, x, residual, relu, views, shared), views)
        if not torch.is_grad_enabled():
            y = fused_kernels.running_norm_act(norm, x, residual, relu)
            return Twice(y, y, views)
    y = norm(x) if views == 1 else torch.cat([norm(view) for view in x.chunk(views)])
    y = y if residual is None else y + residual
    y = F.relu(y) if relu else y
    return Twice(y, y, views)


def max_pool(pool: nn.Module, x: Tensor) -> Tensor:
    """The stem's max-pooling, the identity for small images."""
    usual = isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    return fused_kernels.max_pool(x) if usual and _lies_well(x) else pool(x)


def _suits(norm: _BatchNorm, x: Tensor) -> bool:
    usual = norm.affine and norm.track_running_stats and norm.momentum is not None
    return usual and _lies_well(x) and x.dtype != torch.float64


def _lies_well(x: Tensor) -> bool:
    return x.device.type in DEVICES and x.is_contiguous(memory_format=torch.channels_last)


def _shortcut(block: BasicBlock | Bottleneck, x: Tensor, views: int) -> Tensor:
    if block.downsample is None:
        return x
    *before, norm = block.downsample
    for layer in before:
        x = layer(x)
    return norm_act(norm, x, relu=False, views=views)


def _block(block: BasicBlock | Bottleneck, x: Tensor | Twice, *layers: tuple[nn.Module, nn.Module]) -> Tensor | Twice:
    """Convolutions, each with its norm, and the shortcut. In a network that is not fused as a whole, input and output
    are one tensor each."""
    out, other, views = x if isinstance(x, Twice) else Twice(x, x)
    *before, (last, norm) = layers
    relu = _has_relu(block)
    for convolution, norm_before in before:
        out = norm_act(norm_before, convolution(out), relu=relu, views=views)
    result = norm_act_twice(norm, last(out), _shortcut(block, other, views), relu, views)
    return result if isinstance(x, Twice) else result.one


class FusedBasicBlock(BasicBlock):
    """Two convolutions."""

    def forward(self, x: Tensor | Twice) -> Tensor | Twice:
        """One tensor for one, a pair for a pair."""
        return _block(self, x, (self.conv1, self.bn1), (self.conv2, self.bn2))


class FusedBottleneck(Bottleneck):
    """Three convolutions."""

    def forward(self, x: Tensor | Twice) -> Tensor | Twice:
        """One tensor for one, a pair for a pair."""
        return _block(self, x, (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3))


def stem_convolution(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """A 7 x 7 convolution of 3 channels with stride 2, as a 4 x 4 convolution of 16 channels with stride 1.

    Tensor cores work on at least 8 channels: three leave most of them idle. Blocks of 2 x 2 pixels become channels
    (space to depth), and so does the filter, padded by a leading row and column of zeros.
    """
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.in_channels, conv.groups, conv.bias)
    even = images.shape[2] % 2 == 0 and images.shape[3] % 2 == 0
    if shape != ((7, 7), (2, 2), (3, 3), (1, 1), 3, 1, None) or not even or images.device.type not in DEVICES:
        features: Tensor = conv(images)
        return features
    weight = standardise(conv.weight) if isinstance(conv, StandardisedConv2d) else conv.weight
    return F.conv2d(_folded(F.pad(images, (4, 2, 4, 2, 0, 1))), _folded(F.pad(weight, (1, 0, 1, 0, 0, 1))))


def _folded(x: Tensor) -> Tensor:
    """Space to depth: (N, C, 2H, 2W) to (N, 4C, H, W)."""
    x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
    return x.contiguous(memory_format=torch.channels_last)


def _pooled(network: ResNet | NarrowResNet, images: Tensor, views: int = 1) -> Tensor:
    """The pooled features of images, of which `views` equal parts have their own BatchNorm statistics."""
    stem = stem_convolution(network.conv1, images)
    x = norm_act_twice(network.bn1, stem, relu=_has_relu(network), views=views)
    if not isinstance(network.maxpool, nn.Identity):
        pooled = max_pool(network.maxpool, x.one)
        x = Twice(pooled, pooled, views)
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        x = stage(x)
    features: Tensor = network.avgpool(x.one)
    return features.flatten(1)


class FusedResNet(ResNet):
    """torchvision's network with a fused stem and blocks."""

    def _forward_impl(self, x: Tensor) -> Tensor:
        features: Tensor = self.fc(_pooled(self, x))
        return features


class FusedNarrowResNet(NarrowResNet):
    """This package's network with a fused stem and blocks."""

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features."""
        return _pooled(self, images)


class FusedBackbone(Backbone):
    """A backbone that takes several small views in one pass, which fills a GPU better than a pass for each."""

    def forward(self, images: Tensor, views: int = 1) -> Tensor:
        """Features; the result is that of a pass for each view."""
        network, pixels = self.network, images.numel() // images.shape[1]
        small = views > 1 and pixels <= JOINED_PIXELS and images.device.type in DEVICES
        if small and network.training and isinstance(network, FusedResNet | FusedNarrowResNet):
            return _pooled(network, images, views)
        return super().forward(images, views)


class FusedStandardisedConv2d(StandardisedConv2d):
    """Standardises its filter and rounds it for the convolution in one kernel."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.device.type not in DEVICES or weight.dtype != torch.float32 or not _is_dense(weight):
            return super()._conv_forward(input, weight, bias)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        kernel = fused_kernels.standardised(weight, EPSILON, dtype)
        output: Tensor = nn.Conv2d._conv_forward(self, input, kernel, bias)
        return output


def _is_dense(weight: Tensor) -> bool:
    """Whether each filter is contiguous in memory, channels first or last."""
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Backbone: FusedBackbone,
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    ResNet: FusedResNet,
    NarrowResNet: FusedNarrowResNet,
    StandardisedConv2d: FusedStandardisedConv2d,
}
