"""Weight standardisation against its definition; applying and baking it change what they should and no more."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.weight_standardisation import StandardisedConv2d, bake, standardise


def weights(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.3, 0.7, shape))


def by_hand(weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Filter by filter: minus its mean, over its unbiased deviation plus eps."""
    filters = []
    for values in weight.numpy():
        n = values.size
        mean = sum(values.flatten()) / n
        deviation = np.sqrt(sum((x - mean) ** 2 for x in values.flatten()) / (n - 1))
        filters.append((values - mean) / (deviation + eps))
    return torch.from_numpy(np.stack(filters))


def network() -> nn.Sequential:
    """Plain, depthwise, pointwise and dilated convolutions with norms, and layers that are no convolution of images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)),
        nn.Conv2d(4, 6, 1, stride=2),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 2, 2, dilation=2, padding=2, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 5),
    )
    return model.double()


def images(seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 3, 8, 8)))


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (5, 1, 2, 2), (3, 7, 1, 1), (1, 2, 1, 1)])
def test_standardise_against_numpy(shape):
    weight = weights(0, *shape)
    actual = standardise(weight)
    assert (actual - by_hand(weight)).abs().max() < 1e-13
    filters = actual.flatten(1)
    assert filters.mean(dim=1).abs().max() < 1e-14
    deviation = torch.from_numpy(np.std(weight.numpy(), axis=(1, 2, 3), ddof=1))
    assert (filters.std(dim=1) - deviation / (deviation + 1e-5)).abs().max() < 1e-13


def test_eps_is_added_to_the_deviation():
    # Mean 2, deviation sqrt(2): with eps sqrt(2) the filter is (-1, 1) / (2 sqrt(2)).
    weight = torch.tensor([1.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
    root = 2**0.5
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64) / (2 * root)
    assert (standardise(weight, eps=root).flatten() - expected).abs().max() < 1e-15
    tiny = 1e-5 * weight  # deviation sqrt(2) 1e-5 and the default eps of 1e-5
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64) / (root + 1)
    assert (standardise(tiny).flatten() - expected).abs().max() < 1e-13


@pytest.mark.parametrize("constant", [0.0, 0.5, 0.7])
def test_a_constant_filter_gives_zero_and_a_finite_gradient(constant):
    weight = torch.full((2, 3, 3, 3), constant, dtype=torch.float64, requires_grad=True)
    result = standardise(weight)
    assert result.abs().max() < 1e-9
    result.square().sum().backward()
    assert weight.grad.isfinite().all()


def test_gradient_flows_through_the_standardisation():
    assert torch.autograd.gradcheck(standardise, weights(1, 3, 2, 2, 2).requires_grad_())
    layer = StandardisedConv2d(2, 3, 2, padding=1).double()

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    x = weights(2, 2, 2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(convolve, (x, weights(3, 3, 2, 2, 2).requires_grad_(), layer.bias))


def test_gradient_of_a_filter_has_no_mean():
    layer = StandardisedConv2d(3, 4, 3).double()
    layer(images()).square().sum().backward()
    assert layer.weight.grad.abs().max() > 1e-2
    assert layer.weight.grad.sum(dim=(1, 2, 3)).abs().max() < 1e-10


def test_a_standardised_layer_convolves_with_the_standardised_kernel():
    layer = StandardisedConv2d(3, 4, 3, stride=2, padding=1).double()
    raw = layer.weight.detach().clone()
    expected = F.conv2d(images(), by_hand(raw), layer.bias, stride=2, padding=1)
    assert (layer(images()) - expected).abs().max() < 1e-12
    assert torch.equal(layer.weight, raw)


def test_apply_changes_convolutions_of_images_and_nothing_else():
    model = network()
    model.append(nn.Unflatten(1, (5, 1)))
    model.append(nn.Conv1d(5, 2, 1).double())
    model.append(nn.ConvTranspose1d(2, 2, 1).double())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert weight_standardisation.apply(model) is model
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    changed = {name for name, module in model.named_modules() if type(module) is not kinds[name]}
    assert changed == {"0", "3.0", "4", "6"}
    assert all(type(model.get_submodule(name)) is StandardisedConv2d for name in changed)


def test_filters_of_one_weight_are_left_alone():
    """They have no deviation: standardising them would give NaN."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=4)).double()
    x = images()[:, :1]
    expected = model(x)
    weight_standardisation.apply(model)
    assert torch.equal(model(x), expected)


def test_plain_and_standardised_networks_load_each_other_s_weights():
    plain, standardised = network(), weight_standardisation.apply(network())
    with torch.no_grad():
        for parameter in standardised.parameters():
            parameter.add_(0.1)
    plain.load_state_dict(standardised.state_dict())
    weight_standardisation.apply(plain)
    assert torch.equal(plain(images()), standardised(images()))


@pytest.mark.parametrize("training", [True, False])
def test_baking_gives_a_plain_network_that_computes_the_same(training):
    model = weight_standardisation.apply(network())
    model(images(1))  # running statistics other than 0 and 1
    baked = bake(copy.deepcopy(model))
    plain = network()
    assert [type(module) for module in baked.modules()] == [type(module) for module in plain.modules()]
    assert list(baked.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(baked.state_dict())
    raw = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (model, baked, plain):
        each.train(training)
    expected = model(images())
    assert torch.equal(baked(images()), expected)
    assert torch.equal(plain(images()), expected)
    assert not torch.equal(network().train(training)(images()), expected)

    for name, value in baked.state_dict().items():
        if name in ("0.weight", "3.0.weight", "4.weight", "6.weight"):
            assert (value - by_hand(raw[name])).abs().max() < 1e-13
        elif "running" not in name and "tracked" not in name:
            assert torch.equal(value, raw[name])
    assert all(parameter.requires_grad for parameter in baked.parameters())


def test_baking_returns_its_argument_and_leaves_plain_networks_alone():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert bake(model) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_constant_added_to_a_filter_or_its_length_do_not_matter():
    model = weight_standardisation.apply(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))).double()
    plain = bake(copy.deepcopy(model))
    expected, expected_plain = model(images()), plain(images())
    offsets = torch.tensor([0.5, -2.0, 0.0, 10.0], dtype=torch.float64).view(-1, 1, 1, 1)
    with torch.no_grad():
        model[0].weight.add_(offsets)
        plain[0].weight.add_(offsets)
    assert (model(images()) - expected).abs().max() < 1e-12
    assert (plain(images()) - expected_plain).abs().max() > 0.1
    with torch.no_grad():
        model[0].weight.mul_(7.0)
    assert (model(images()) - expected).abs().max() < 1e-8
