"""The method around the loss: two networks, the order of the views, the moving target, its state and its diagnostics.

The networks are a few numbers wide and in float64. What they should compute is written out from their weights.
"""

import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tico_ssl import TiCo, tico_loss
from tico_ssl.config.sections import OptimizerConfig
from tico_ssl.methods._base import Batch, Method
from tico_ssl.methods.tico import Config, build
from tico_ssl.optim.groups import build_optimizer

TIGHT = 1e-12
WIDTH, HIDDEN, DIM, IMAGES = 6, 7, 5, 8


class Tiny(nn.Module):
    """Convolution, BatchNorm, ReLU and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(images))).mean(dim=(2, 3))


def method(seed: int = 0, **values) -> TiCo:
    """TiCo in training mode; scales and shifts of its norms are not the neutral ones."""
    torch.manual_seed(seed)
    backbone = Tiny()
    nn.init.uniform_(backbone.norm.weight, 0.5, 1.5)
    nn.init.normal_(backbone.norm.bias)
    return TiCo(backbone, width=WIDTH, config=Config(hidden=HIDDEN, dim=DIM, **values)).double().train()


def batch(seed: int = 0, views: int = 2) -> Batch:
    generator = np.random.default_rng(seed)
    images = [generator.standard_normal((IMAGES, 3, 8, 8)) * (1 + k) + k for k in range(views)]
    return Batch(tuple(torch.from_numpy(view) for view in images), torch.arange(IMAGES))


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """BatchNorm on the statistics of the batch."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight.view(shape) + norm.bias.view(shape)


def by_hand(backbone: nn.Module, head: nn.Module, images: Tensor) -> Tensor:
    """The embedding from weights alone; no module is called, so no running statistics move."""
    features = F.relu(normalised(F.conv2d(images, backbone.conv.weight, padding=1), backbone.norm)).mean(dim=(2, 3))
    hidden = F.relu(normalised(features @ head[0].weight.T, head[1]))
    last = hidden @ head[3].weight.T
    return last if head[3].bias is None else last + head[3].bias


def online_by_hand(model: TiCo, images: Tensor) -> Tensor:
    return by_hand(model.backbone, model.projector, images)


def target_by_hand(model: TiCo, images: Tensor) -> Tensor:
    return by_hand(model.target[0], model.target[1], images)


def online_parameters(model: TiCo) -> list[Tensor]:
    return [*model.backbone.parameters(), *model.projector.parameters()]


def pull_apart(model: TiCo, seed: int = 1) -> None:
    """Make the online network differ from its target."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in online_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)


def train_step(model: TiCo, optimizer: torch.optim.Optimizer, number: int, total: int = 10) -> Tensor:
    output = model(batch(number))
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    model.after_step(number / total)
    return output.loss.detach()


# Construction


def test_it_keeps_the_contract_of_methods():
    assert isinstance(method(), Method)


@pytest.mark.parametrize("last_bias", [False, True])
def test_structure_of_the_projector(last_bias):
    first, norm, relu, last = method(last_bias=last_bias).projector
    assert [type(layer) for layer in (first, norm, relu, last)] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert (first.in_features, first.out_features, first.bias) == (WIDTH, HIDDEN, None)
    assert (norm.num_features, norm.affine, norm.eps, norm.momentum) == (HIDDEN, True, 1e-5, 0.1)
    assert (last.in_features, last.out_features) == (HIDDEN, DIM)
    assert (last.bias is not None) == last_bias


def test_the_paper_s_sizes_and_constants_are_the_defaults():
    config = Config()
    assert (config.hidden, config.dim, config.last_bias) == (4096, 256, False)
    assert (config.rho, config.beta, config.detach, config.source) == (8.0, 0.9, False, "online")
    assert (config.ema_start, config.ema_end) == (0.99, 1.0)
    assert (config.symmetric, config.view_order) == (False, "fixed")
    model = TiCo(nn.Flatten(), width=12)
    assert [tuple(p.shape) for p in model.projector.parameters()] == [(4096, 12), (4096,), (4096,), (256, 4096)]


def test_width_is_said_or_known_by_the_backbone():
    with pytest.raises(ValueError, match=r"number of features.*width="):
        TiCo(Tiny())
    backbone = Tiny()
    backbone.width = WIDTH
    config = Config(hidden=HIDDEN, dim=DIM)
    assert TiCo(backbone, config=config).projector[0].in_features == WIDTH
    assert build(config, backbone).projector[0].in_features == WIDTH
    assert TiCo(backbone, width=9, config=config).projector[0].in_features == 9


def test_target_starts_as_a_separate_copy():
    model = method()
    online = nn.Sequential(model.backbone, model.projector)
    assert list(online.state_dict()) == list(model.target.state_dict())
    for name, value in online.state_dict().items():
        twin = model.target.state_dict()[name]
        assert torch.equal(value, twin)
        assert value.data_ptr() != twin.data_ptr()


@pytest.mark.parametrize("symmetric", [False, True])
def test_target_takes_no_gradient(symmetric):
    model = method(symmetric=symmetric)
    pull_apart(model)
    model(batch()).loss.backward()
    assert all(not p.requires_grad and p.grad is None for p in model.target.parameters())
    for parameter in online_parameters(model):
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_target_is_not_among_the_optimised_parameters(name):
    model = method(last_bias=True)
    online = {id(p) for p in online_parameters(model)}
    assert {id(p) for p in model.parameters() if p.requires_grad} == online
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == online
    before = [p.clone() for p in model.target.parameters()]
    model(batch()).loss.backward()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.target.parameters(), before))


# The step


@pytest.mark.parametrize("last_bias", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("source", ["online", "target"])
def test_forward_is_the_loss_of_the_two_networks_embeddings(last_bias, detach, source):
    model = method(last_bias=last_bias, rho=5.0, beta=0.7, detach=detach, source=source)
    pull_apart(model)
    covariance = torch.zeros(DIM, DIM, dtype=torch.float64)
    for step in range(3):
        views = batch(step).views
        z_1, z_2 = online_by_hand(model, views[0]), target_by_hand(model, views[1])
        expected = tico_loss(z_1, z_2, covariance, 5.0, 0.7, detach, source)
        expected_gradients = torch.autograd.grad(expected.loss, online_parameters(model))
        covariance = expected.covariance
        output = model(batch(step))
        assert (output.loss - expected.loss).abs() < TIGHT
        assert set(output.terms) == {"invariance", "contrast"}
        for name, term in output.terms.items():
            assert (term - getattr(expected, name)).abs() < TIGHT
        assert (output.embedding - z_1).abs().max() < TIGHT
        assert not output.embedding.requires_grad
        assert (model.criterion.covariance - covariance).abs().max() < TIGHT
        gradients = torch.autograd.grad(output.loss, online_parameters(model))
        for actual, wanted in zip(gradients, expected_gradients, strict=True):
            assert (actual - wanted).abs().max() < 1e-11


def test_embed_gives_the_online_embedding_before_normalisation():
    model = method()
    pull_apart(model)
    images = batch().views[0]
    embedding = model.embed(images)
    assert (embedding - online_by_hand(model, images)).abs().max() < TIGHT
    assert (embedding.norm(dim=1) - 1).abs().min() > 1e-4


def test_views_beyond_the_first_two_are_not_looked_at():
    plain, extended = method(), method()
    more = batch(0, views=4)
    assert torch.equal(plain(Batch(more.views[:2], more.index)).loss, extended(more).loss)


def test_symmetric_loss_is_that_of_both_directions_with_forwards_of_their_own():
    model, plain = method(symmetric=True), method()
    for each in (model, plain):
        pull_apart(each)
    covariance = torch.zeros(DIM, DIM, dtype=torch.float64)
    for step in range(2):
        view_1, view_2 = batch(step).views
        z_1 = torch.cat([online_by_hand(model, view) for view in (view_1, view_2)])
        z_2 = torch.cat([target_by_hand(model, view) for view in (view_2, view_1)])
        expected = tico_loss(z_1, z_2, covariance)
        covariance = expected.covariance
        expected_gradients = torch.autograd.grad(expected.loss, online_parameters(model))
        output = model(batch(step))
        assert (output.loss - expected.loss).abs() < TIGHT
        assert (model.criterion.covariance - covariance).abs().max() < TIGHT
        assert (output.embedding - z_1[:IMAGES]).abs().max() < TIGHT
        for actual, wanted in zip(torch.autograd.grad(output.loss, online_parameters(model)), expected_gradients):
            assert (actual - wanted).abs().max() < 1e-11
        # One forward of both views would share statistics, and one direction is another loss.
        together = online_by_hand(model, torch.cat([view_1, view_2]))
        assert (together - z_1).abs().max() > 1e-3
        assert (output.loss - plain(batch(step)).loss).abs() > 1e-3
    assert model.backbone.norm.num_batches_tracked == 4
    assert model.target[0].norm.num_batches_tracked == 4


@pytest.mark.parametrize(
    ("view_order", "swaps"),
    [("fixed", [False] * 4), ("swapped", [True] * 4), ("alternate", [False, True, False, True])],
)
def test_order_of_the_views(view_order, swaps):
    model = method(view_order=view_order)
    pull_apart(model)
    for step, swap in enumerate(swaps):
        views = batch(step).views
        seen, other = views[::-1] if swap else views
        before = model.criterion.covariance.clone()
        expected = tico_loss(online_by_hand(model, seen), target_by_hand(model, other), before)
        opposite = tico_loss(online_by_hand(model, other), target_by_hand(model, seen), before)
        output = model(batch(step))
        assert (output.loss - expected.loss).abs() < TIGHT
        assert (output.loss - opposite.loss).abs() > 1e-3
        assert (output.embedding - online_by_hand(model, seen)).abs().max() < TIGHT
        assert int(model.steps) == step
        model.after_step(step / 4)


@pytest.mark.parametrize("view_order", ["swapped", "alternate"])
def test_views_of_two_sizes_keep_their_order(view_order):
    view_1, view_2 = batch().views
    uneven = Batch((view_1, view_2[:, :, :6, :6]), torch.arange(IMAGES))
    assert method()(uneven).loss.isfinite()
    with pytest.raises(ValueError, match=f"{view_order}.*the same size"):
        method(view_order=view_order)(uneven)


def test_evaluation_mode_moves_nothing():
    model = method()
    model(batch())
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model(batch(1)).loss, model(batch(1)).loss
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nan_is_left_to_the_training_loop():
    views = batch().views
    views[0][0, 0, 0, 0] = math.nan
    assert method()(Batch(views, torch.arange(IMAGES))).loss.isnan()


# The target


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(("start", "end"), [(0.99, 1.0), (0.5, 0.8)])
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_after_step_moves_the_target_by_the_cosine_decay(progress, start, end, kind):
    model = method(ema_start=start, ema_end=end, last_bias=True)
    pull_apart(model)
    alpha = end - (end - start) * (math.cos(math.pi * progress) + 1) / 2
    online = [p.detach().clone() for p in online_parameters(model)]
    target = [p.clone() for p in model.target.parameters()]
    assert len(online) == len(target) == 8
    logged = model.after_step(progress if kind == "float" else torch.tensor(progress, dtype=torch.float64))
    assert abs(float(logged["ema_decay"]) - alpha) < 1e-15
    for now, theta, xi in zip(model.target.parameters(), online, target, strict=True):
        assert (now - (alpha * xi + (1 - alpha) * theta)).abs().max() < 1e-15
        if alpha < 1:
            assert (now - xi).abs().max() > 1e-5
    assert all(torch.equal(p, theta) for p, theta in zip(online_parameters(model), online))
    assert all(not p.requires_grad for p in model.target.parameters())
    assert int(model.steps) == 1


def test_target_follows_the_parameters_after_the_optimiser_s_step():
    model = method(ema_start=0.6)
    pull_apart(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = [p.clone() for p in model.target.parameters()]
    old = [p.detach().clone() for p in online_parameters(model)]
    output = model(batch())
    gradients = torch.autograd.grad(output.loss, online_parameters(model), retain_graph=True)
    output.loss.backward()
    optimizer.step()
    model.after_step(0.0)
    for now, xi, theta, gradient in zip(model.target.parameters(), before, old, gradients, strict=True):
        assert (now - (0.6 * xi + 0.4 * (theta - 0.5 * gradient))).abs().max() < 1e-14


def running_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """After one batch, from mean 0 and variance 1, by momentum 0.1; the variance is the unbiased one."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    return 0.1 * x.mean(axes), 0.9 + 0.1 * x.var(axes, correction=1)


def test_target_has_running_statistics_of_its_own_views():
    model = method(ema_start=0.5)
    pull_apart(model)
    view_1, view_2 = batch().views
    convolved_1 = F.conv2d(view_1, model.backbone.conv.weight, padding=1).detach()
    convolved_2 = F.conv2d(view_2, model.target[0].conv.weight, padding=1)
    model(batch())
    model.after_step(0.3)  # moves parameters, not buffers
    for norm, convolved in ((model.backbone.norm, convolved_1), (model.target[0].norm, convolved_2)):
        mean, variance = running_statistics(convolved)
        assert (norm.running_mean - mean).abs().max() < TIGHT
        assert (norm.running_var - variance).abs().max() < TIGHT
        assert norm.num_batches_tracked == 1
    assert (model.backbone.norm.running_mean - model.target[0].norm.running_mean).abs().max() > 1e-2
    assert (model.projector[1].running_mean - model.target[1][1].running_mean).abs().max() > 1e-3


def test_target_works_on_the_statistics_of_its_batch():
    plain, spoilt = method(), method()
    for norm in (spoilt.target[0].norm, spoilt.target[1][1]):
        norm.running_mean.fill_(100.0)
        norm.running_var.fill_(1e6)
    assert torch.equal(plain(batch()).loss, spoilt(batch()).loss)
    plain.eval()
    spoilt.eval()
    assert (plain(batch()).loss - spoilt(batch()).loss).abs() > 1e-3


def test_a_target_may_work_with_the_running_averages_of_the_online_network():
    model = method(target_statistics="running", ema_start=0.5)
    assert model.backbone.training and not model.target[0].norm.training
    output = model(batch())
    assert model.target[0].norm.num_batches_tracked == 0  # it does not count its own batches
    output.loss.backward()
    model.after_step(0.0)
    for name, value in model.backbone.named_buffers():
        assert torch.equal(value, model.target[0].get_buffer(name)), name
    with torch.no_grad():
        first, second = model.target(batch(1).views[1]), model.target(batch(1).views[1][:3])
    torch.testing.assert_close(first[:3], second)  # an image's embedding does not depend on the others


# State and diagnostics


@pytest.mark.parametrize("view_order", ["fixed", "alternate"])
def test_a_copy_from_the_state_goes_on_bit_for_bit(view_order):
    def fresh(seed: int) -> tuple[TiCo, torch.optim.Optimizer]:
        model = method(seed, view_order=view_order, ema_start=0.9)
        config = OptimizerConfig(name="lars", lr=0.5, trust_coefficient=0.1, weight_decay=1e-3)
        return model, build_optimizer(model, config)

    model, optimizer = fresh(0)
    for number in range(3):
        train_step(model, optimizer, number)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    resumed, resumed_optimizer = fresh(1)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    for number in range(3, 7):
        expected = train_step(model, optimizer, number)
        assert torch.equal(train_step(resumed, resumed_optimizer, number), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


@pytest.mark.parametrize("missing", ["criterion.covariance", "steps", "target.0.conv.weight", "backbone.conv.weight"])
def test_every_part_of_the_state_decides_what_comes_next(missing):
    """Leave one part at its initial value, and the next loss is another one."""
    model = method(view_order="alternate", ema_start=0.5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for number in range(3):
        train_step(model, optimizer, number)
    state = model.state_dict()
    assert missing in state
    partial = method(view_order="alternate", ema_start=0.5)
    partial.load_state_dict(state | {missing: partial.state_dict()[missing]})
    assert (model(batch(3)).loss - partial(batch(3)).loss).abs() > 1e-6


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_diagnostics_against_numpy(steps):
    model = method()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(steps):
        train_step(model, optimizer, number)
    eigenvalues = np.linalg.eigvalsh(model.criterion.covariance.numpy())
    shares = eigenvalues / eigenvalues.sum()
    assert abs(eigenvalues.sum() - (1 - 0.9**steps)) < TIGHT
    diagnostics = model.diagnostics()
    assert set(diagnostics) == {"participation_ratio", "largest_eigenvalue"}
    assert abs(float(diagnostics["participation_ratio"]) - 1 / np.sum(shares**2)) < TIGHT * 10
    assert abs(float(diagnostics["largest_eigenvalue"]) - shares.max()) < 1e-6


@pytest.mark.parametrize("steps", [1, 3])
def test_diagnostics_of_collapse_and_of_its_opposite(steps):
    model = method()
    direction = F.normalize(torch.arange(1.0, DIM + 1, dtype=torch.float64), dim=0)
    model.criterion.covariance.copy_((1 - 0.9**steps) * torch.outer(direction, direction))
    assert abs(float(model.diagnostics()["participation_ratio"]) - 1) < TIGHT
    assert abs(float(model.diagnostics()["largest_eigenvalue"]) - 1) < 1e-6
    model.criterion.covariance.copy_((1 - 0.9**steps) * torch.eye(DIM) / DIM)
    assert abs(float(model.diagnostics()["participation_ratio"]) - DIM) < 1e-6
    assert abs(float(model.diagnostics()["largest_eigenvalue"]) - 1 / DIM) < 1e-6


def test_diagnostics_before_the_first_step_are_finite():
    assert all(value.isfinite() for value in method().diagnostics().values())


@pytest.mark.parametrize("rho", [3.0, 8.0])
def test_a_collapsed_network_costs_what_it_says(rho):
    model = method(rho=rho, last_bias=True)
    with torch.no_grad():
        for last in (model.projector[3], model.target[1][3]):
            last.weight.zero_()
            last.bias.copy_(torch.arange(1.0, DIM + 1))
    for number in range(300):
        loss = model(batch(number % 3)).loss.detach()
    assert abs(float(loss) - rho) < 1e-10
    assert model.collapsed_loss() == rho
