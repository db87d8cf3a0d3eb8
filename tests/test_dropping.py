"""What a network drops at random is found wherever a library keeps its rate."""

import pytest
import torch
from timm.layers import DropBlock2d, DropPath, PatchDropout
from torch import nn
from torchvision.models.densenet import _DenseLayer
from torchvision.models.swin_transformer import ShiftedWindowAttention
from torchvision.ops import StochasticDepth

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.dropping import drop_nothing, drop_rates, drops
from tico_ssl.networks.target import Target


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


MODULES = {
    "dropout": (nn.Dropout(0.5), (8, 6)),
    "dropout of channels": (nn.Dropout2d(0.5), (4, 6, 3, 3)),
    "attention": (Attention(6, 2, dropout=0.5, batch_first=True), (4, 5, 6)),
    "timm's drop path": (DropPath(0.5), (8, 6)),
    "timm's drop block": (DropBlock2d(0.5, block_size=2), (2, 3, 8, 8)),
    "timm's patch dropout": (PatchDropout(0.5), (2, 9, 4)),
    "torchvision's stochastic depth": (StochasticDepth(0.5, "row"), (8, 6)),
    "torchvision's window attention": (
        ShiftedWindowAttention(8, [2, 2], [0, 0], 2, attention_dropout=0.5, dropout=0.5),
        (2, 4, 4, 8),
    ),
    "torchvision's dense layer": (_DenseLayer(4, 4, 2, drop_rate=0.5), (4, 4, 5, 5)),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_drops_is_noticed_and_can_drop_nothing(name):
    module, shape = MODULES[name]
    module.train()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def outputs():
        for seed in (1, 2):
            torch.manual_seed(seed)
            yield module(x)

    one, other = outputs()
    assert drops(module) and not torch.equal(one, other)
    drop_nothing(module)
    one, other = outputs()
    assert not drops(module) and torch.equal(one, other)


def test_other_numbers_are_no_rates():
    class Pool(nn.Module):
        p = 3.0

    assert drop_rates(Pool()) == drop_rates(nn.Dropout(0.0)) == drop_rates(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("timm/resnet18", {"drop_rate": 0.3}),
        ("timm/vit_tiny_patch16_224", {"patch_drop_rate": 0.5, "drop_path_rate": 0.3}),
    ],
)
def test_a_target_has_no_noise_of_its_own(name, arguments):
    config = BackboneConfig(name=name, arguments=arguments)
    online = nn.Sequential(build_backbone(config, 32)).train()
    target, images = Target(online).train(), torch.randn(4, 3, 32, 32)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(target(images))
    assert torch.equal(*found)
    assert drops(online)
