"""Fused BatchNorm, sum, ReLU and pooling: torch's own modules in double precision are the oracle."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.networks import fused, weight_standardisation
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.narrow_resnet import NarrowResNet

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch):
    """Without a GPU, Triton's interpreter runs the kernels."""
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))


def activation(seed: int, *shape: int, mean: float = 0.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + mean
    return x.to(DEVICE, memory_format=torch.channels_last)


def norm_of(channels: int, seed: int = 0) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)
    return norm.to(DEVICE)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float(
        (actual.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max().clamp_min(1e-6)
    )


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(2, 5),
    channels=st.sampled_from([3, 16, 64, 130]),
    side=st.integers(1, 9),
    adds=st.booleans(),
    relu=st.booleans(),
    readers=st.sampled_from(["first", "second", "both"]),
    mean=st.sampled_from([0.0, 5.0, -300.0]),
    views=st.integers(1, 3),
)
def test_forward_backward_and_running_averages(seed, count, channels, side, adds, relu, readers, mean, views):
    """For one reader or two, for several views with their own statistics, and also far from zero, where sums of squares
    lose their digits."""
    x = activation(seed, count * views, channels, side, side + 1, mean=mean).requires_grad_()
    residual = activation(seed + 1, *x.shape).requires_grad_() if adds else None
    norm = norm_of(channels, seed)
    oracle = copy.deepcopy(norm).double()
    y, again, _ = fused.norm_act_twice(norm, x, residual, relu, views)
    assert again.data_ptr() == y.data_ptr()
    gradient = activation(seed + 2, *y.shape)
    read = {"first": [y], "second": [again], "both": [y, again]}[readers]
    shares = [0.25, 0.75] if len(read) == 2 else [1.0]
    torch.autograd.backward(read, [share * gradient for share in shares])

    x_, residual_ = (None if t is None else t.detach().double().requires_grad_() for t in (x, residual))
    expected = torch.cat([oracle(view) for view in x_.chunk(views)])
    expected = expected if residual_ is None else expected + residual_
    # At the kink either side is right, and float32 may see another one: take the one that was seen.
    expected = expected * (y.detach() > 0) if relu else expected
    expected.backward(gradient.double())

    tolerance = 1e-5 if abs(mean) < 10 else 3e-4
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative(y, expected) < tolerance
    assert relative(x.grad, x_.grad) < 10 * tolerance
    assert relative(norm.weight.grad, oracle.weight.grad) < 10 * tolerance
    assert relative(norm.bias.grad, oracle.bias.grad) < tolerance
    assert (norm.running_mean - oracle.running_mean).abs().max() < tolerance  # the deviation is about two
    assert relative(norm.running_var, oracle.running_var) < tolerance
    assert norm.num_batches_tracked == views
    if residual is not None:
        assert relative(residual.grad, residual_.grad) < tolerance


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 64, 130]), st.booleans(), st.booleans())
def test_running_averages_in_evaluation_mode(seed, channels, adds, relu):
    norm = norm_of(channels, seed)
    norm(activation(seed, 4, channels, 3, 3, mean=5.0))
    norm.eval()
    x = activation(seed + 1, 3, channels, 5, 4, mean=5.0)
    residual = activation(seed + 2, *x.shape) if adds else None
    with torch.no_grad():
        y = fused.norm_act(norm, x, residual, relu)
        expected = copy.deepcopy(norm).double()(x.double())
        expected = expected if residual is None else expected + residual
    assert relative(y, F.relu(expected) if relu else expected) < 1e-5
    assert norm.num_batches_tracked == 1


def test_half_precision_is_as_good_as_torchs():
    norm = norm_of(32)
    plain = copy.deepcopy(norm)
    x = activation(0, 4, 32, 6, 6).bfloat16()
    oracle = F.relu(copy.deepcopy(norm).double()(x.double()))
    ours, theirs = relative(fused.norm_act(norm, x), oracle), relative(F.relu(plain(x)), oracle)
    assert fused.norm_act(norm, x).dtype == torch.bfloat16
    rounds_down = 1 if DEVICE.type == "cuda" else 2  # as Triton's interpreter does
    assert ours <= rounds_down * theirs + 1e-4


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 3),
    channels=st.sampled_from([1, 8, 70]),
    height=st.integers(1, 13),
    width=st.integers(1, 13),
)
def test_pooling(seed, count, channels, height, width):
    x = activation(seed, count, channels, height, width).requires_grad_()
    y = fused.max_pool(nn.MaxPool2d(3, 2, 1), x)
    expected = F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(y, expected)
    gradient = activation(seed + 1, *y.shape)
    (ours,) = torch.autograd.grad(y, x, gradient)
    (theirs,) = torch.autograd.grad(expected, x, gradient)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_pooling_gives_the_gradient_to_the_first_of_equals():
    x = torch.zeros(1, 2, 6, 6, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    (ours,) = torch.autograd.grad(fused.max_pool(nn.MaxPool2d(3, 2, 1), x).sum(), x)
    (theirs,) = torch.autograd.grad(F.max_pool2d(x, 3, 2, 1).sum(), x)
    assert torch.equal(ours, theirs)


def shortcut(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))


def without_relu(network: nn.Module) -> nn.Module:
    """After the stem there is none, and in a block neither."""
    network.relu = network.layer2[0].relu = nn.Identity()
    network.maxpool = nn.Identity()
    return network


@pytest.mark.parametrize(
    "build",
    [
        lambda: ResNet(BasicBlock, [1, 1, 1, 1]),
        lambda: without_relu(NarrowResNet((1, 1, 1, 1), 16, 3)),
        lambda: NarrowResNet((1, 2, 1, 1), 16, 3),
        lambda: weight_standardisation.apply(NarrowResNet((1, 1, 1, 1), 8, 3)),
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), Bottleneck(16, 8, downsample=shortcut(16, 32)), Bottleneck(32, 8)),
    ],
)
def test_a_whole_network_computes_the_same(build, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    plain = build()
    plain = plain.to(DEVICE, memory_format=torch.channels_last).train()
    ours = fused.fuse(copy.deepcopy(plain))
    assert any(type(module) in fused.FUSED.values() for module in ours.modules())
    assert ours.state_dict().keys() == plain.state_dict().keys()
    oracle = copy.deepcopy(plain).double()
    images = activation(3, 6, 3, 40, 40)
    gradient = torch.randn(copy.deepcopy(plain)(images).shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for network in (ours, plain, oracle):
        x = images.double() if network is oracle else images
        network(x).backward(gradient.to(x.dtype))
    truth = dict(oracle.named_parameters())
    for (key, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        exact = truth[key].grad
        ours_off, theirs_off = ((grad.double() - exact).norm() / exact.norm() for grad in (mine.grad, theirs.grad))
        assert ours_off < 3 * theirs_off + 2e-3, key  # in float32 a ReLU may be on the other side
    for mine, theirs in zip(ours.buffers(), oracle.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-4)
    ours.eval(), plain.eval()
    assert (ours(images) - plain(images)).norm() < 2e-3 * plain(images).norm()


class OwnBlock(BasicBlock):
    """A block of somebody's own."""


@pytest.mark.parametrize("part", ["stem", "block", "class"])
def test_what_the_kernels_do_not_compute_stays_as_it_is(part, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    network = NarrowResNet((1, 1, 1, 1), 8, 3)
    if part == "class":
        network.layer2[0].__class__ = OwnBlock
    else:
        (network if part == "stem" else network.layer2[0]).relu = nn.GELU()
    network = network.to(DEVICE, memory_format=torch.channels_last)
    ours = fused.fuse(copy.deepcopy(network))
    assert type(ours) is NarrowResNet
    assert type(ours.layer2[0]) is (
        BasicBlock if part == "block" else fused.FusedBasicBlock if part == "stem" else OwnBlock
    )
    assert type(ours.layer1[0]) is fused.FusedBasicBlock
    images = activation(3, 4, 3, 24, 24)
    assert relative(ours(images), network.double()(images.double())) < 1e-4


@pytest.mark.parametrize("size", [32, 40])
def test_views_in_one_pass_are_those_of_a_pass_each(size, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    config = BackboneConfig(name="tico/resnet10-w8", stem_padding=2, zero_gamma=False)
    torch.manual_seed(0)
    plain = build_backbone(config, size).to(DEVICE, memory_format=torch.channels_last).double()
    joined = fused.fuse(copy.deepcopy(plain).float())
    passes = []
    joined.network.conv1.register_forward_hook(lambda *_: passes.append(1))
    images = activation(3, 6, 3, size, size)
    features = joined(images, 2)
    expected = torch.cat([plain(view) for view in images.double().chunk(2)])
    assert len(passes) == 1
    assert relative(features, expected) < 1e-4
    for mine, theirs in zip(joined.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-4)


def test_large_views_have_a_pass_each(monkeypatch):
    monkeypatch.setattr(fused, "JOINED_PIXELS", 4 * 32 * 32 - 1)
    backbone = fused.fuse(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 32).to(DEVICE))
    passes = []
    backbone.network.conv1.register_forward_hook(lambda *_: passes.append(1))
    backbone(activation(0, 4, 3, 32, 32), 2)
    assert len(passes) == 2


def test_kernels_step_back_where_they_do_not_fit():
    norm = norm_of(4)
    x = activation(0, 2, 4, 3, 3)
    expected = F.relu(copy.deepcopy(norm)(x))
    for other in (x.contiguous(), x.double()):
        copied = copy.deepcopy(norm).to(other.dtype)
        torch.testing.assert_close(fused.norm_act(copied, other).float(), expected, rtol=1e-5, atol=1e-5)
    norm.momentum = None  # a plain average over batches
    fused.norm_act(norm, x), fused.norm_act(norm, x + 1)
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2, 3)) + 0.5)


@pytest.mark.parametrize("size", [8, 14, 32, 50])
def test_the_stem_computes_the_same(size):
    conv = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False).to(DEVICE).double()
    images = activation(0, 2, 3, size, size + 2).double()
    ours, theirs = fused.stem_convolution(conv, images), conv(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    gradient = torch.randn_like(theirs)
    (mine,) = torch.autograd.grad(ours, conv.weight, gradient)
    (expected,) = torch.autograd.grad(theirs, conv.weight, gradient)
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


def test_other_stems_are_left_alone():
    images = activation(0, 2, 3, 15, 16)
    for conv in (nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(3, 4, 7, 2, 3)):
        conv.to(DEVICE)
        assert torch.equal(fused.stem_convolution(conv, images), conv(images))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    filters=st.integers(1, 5),
    channels=st.integers(1, 40),
    side=st.sampled_from([1, 3, 7]),
    channels_last=st.booleans(),
)
def test_standardised_filters(seed, filters, channels, side, channels_last):
    if channels * side * side < 2:
        return
    weight = torch.randn(filters, channels, side, side, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    weight = weight.to(DEVICE, memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    exact = weight.double().requires_grad_()
    weight.requires_grad_()
    ours = fused.fused_kernels.standardised(weight, weight_standardisation.EPSILON, torch.float32)
    expected = weight_standardisation.standardise(exact)
    assert relative(ours, expected) < 1e-5
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    ours.backward(gradient)
    expected.backward(gradient.double())
    error = (weight.grad.double() - exact.grad).abs().max()
    assert error < 1e-4 * gradient.abs().max()
