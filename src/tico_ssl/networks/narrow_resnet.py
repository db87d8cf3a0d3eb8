"""ResNets of basic blocks in any width: `tico/resnet18-w16`."""

from functools import partial

from torch import Tensor, nn

from tico_ssl.networks.stems import initialise


class NarrowResNet(nn.Module):
    """torchvision's ResNet of basic blocks, with its parameter names, in any width (torchvision's is fixed at 64)."""

    def __init__(self, blocks: tuple[int, ...], width: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, blocks[0], stride=1)
        self.layer2 = _stage(width, 2 * width, blocks[1], stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = _stage(4 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                initialise(module)

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        pooled: Tensor = self.avgpool(x)
        return pooled.flatten(1)


def _stage(planes: int, out: int, count: int, stride: int) -> nn.Sequential:
    from torchvision.models.resnet import BasicBlock

    shortcut = None
    if stride != 1 or planes != out:
        convolution = nn.Conv2d(planes, out, 1, stride=stride, bias=False)
        if planes < 16:
            _stride_before(convolution)
        shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out))
    return nn.Sequential(BasicBlock(planes, out, stride, shortcut), *(BasicBlock(out, out) for _ in range(count - 1)))


def _stride_before(convolution: nn.Conv2d) -> None:
    """Subsample the input of a strided 1 x 1 convolution instead: the same result.

    With fewer than 16 channels, channels last, in float32, oneDNN in torch 2.14 writes the weight gradient of a strided
    1 x 1 convolution out of bounds, and the process crashes.
    """
    rows, columns = convolution.stride
    convolution.stride = (1, 1)
    convolution.register_forward_pre_hook(partial(_subsampled, rows, columns))


def _subsampled(rows: int, columns: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    """A hook that has a name, so that the network can be pickled."""
    return (inputs[0][..., ::rows, ::columns],)
