"""LARS and LARC against steps worked out by hand and loops over numbers, and the parameter groups of the optimisers."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from test_target_methods import Watched
from tico_ssl.config.sections import OptimizerConfig
from tico_ssl.optim.groups import build_optimizer, load_optimizer, parameter_groups, set_learning_rate
from tico_ssl.optim.lars import LARS

TIGHT = 1e-12
SHAPES = [(2, 3), (3,), (4, 2, 3, 3), (1,), (), (1, 1), (5, 1)]
RATES = [0.0, 0.5, 1.0, 3.2, 2.0, 1.5, 0.7, 0.3, 0.1, 0.032]


def parameters(seed: int = 0, shapes=SHAPES) -> list[nn.Parameter]:
    generator = np.random.default_rng(seed)
    return [nn.Parameter(torch.from_numpy(np.asarray(generator.standard_normal(shape)))) for shape in shapes]


def gradients(seed: int, shapes=SHAPES) -> list[Tensor]:
    generator = np.random.default_rng(seed + 1000)
    return [
        torch.from_numpy(np.asarray(generator.standard_normal(shape) * generator.uniform(0.01, 10))) for shape in shapes
    ]


def hand_out(params: list[nn.Parameter], grads: list[Tensor], factor: float = 1.0) -> None:
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = factor * gradient


def copies(params: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in params]


def length(values: list[float]) -> float:
    return math.sqrt(sum(x * x for x in values))


class Loop:
    """LARS of one parameter, number by number; `lr_inside` is the variant that is not wanted."""

    def __init__(
        self,
        parameter: Tensor,
        momentum: float,
        weight_decay: float,
        trust: float,
        lr_inside: bool = False,
        clip: bool = False,
    ):
        self.clip = clip
        self.adapted = parameter.ndim > 1
        self.p = [float(x) for x in parameter.detach().flatten()]
        self.m = [0.0] * len(self.p)
        self.momentum, self.weight_decay, self.trust, self.lr_inside = momentum, weight_decay, trust, lr_inside

    def step(self, gradient: Tensor, lr: float) -> None:
        g = [float(x) for x in gradient.flatten()]
        if self.adapted:
            g = [gi + self.weight_decay * pi for gi, pi in zip(g, self.p)]
            ratio = 1.0
            if length(self.p) > 0 and length(g) > 0:
                ratio = self.trust * length(self.p) / length(g)
                if self.clip:
                    ratio = min(ratio / lr, 1.0) if lr > 0 else 1.0
            g = [ratio * gi for gi in g]
        scale, rate = (lr, 1.0) if self.lr_inside else (1.0, lr)
        self.m = [self.momentum * mi + scale * gi for mi, gi in zip(self.m, g)]
        self.p = [pi - rate * mi for pi, mi in zip(self.p, self.m)]


def difference(params: list[nn.Parameter], loops: list[Loop]) -> float:
    pairs = [
        (x, y) for p, loop in zip(params, loops, strict=True) for x, y in zip(p.detach().flatten().tolist(), loop.p)
    ]
    return max(abs(x - y) for x, y in pairs)


# The update


def test_two_steps_worked_out_by_hand():
    weight = nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    bias = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = LARS([weight, bias], lr=2.0, momentum=0.9, weight_decay=0.5, trust_coefficient=0.1)

    # |p| = 5. Gradient with decay [[6, 0], [0, 8]], |g| = 10, ratio 0.1 * 5 / 10 = 0.05, m = [[0.3, 0], [0, 0.4]].
    weight.grad = torch.tensor([[4.5, 0.0], [0.0, 6.0]], dtype=torch.float64)
    bias.grad = torch.tensor([0.5, 1.0], dtype=torch.float64)
    optimizer.step()
    expected = torch.tensor([[2.4, 0.0], [0.0, 3.2]], dtype=torch.float64)
    assert (weight - expected).abs().max() < 1e-15
    assert bias.tolist() == [0.0, -4.0]

    # |p| = 4. Gradient with decay [[0, -12], [16, 0]], |g| = 20, ratio 0.02, g = [[0, -0.24], [0.32, 0]],
    # m = 0.9 m + g = [[0.27, -0.24], [0.32, 0.36]]; of the bias 0.9 * [0.5, 1] + [-1, 0] = [-0.55, 0.9].
    optimizer.param_groups[0]["lr"] = 0.5
    weight.grad = torch.tensor([[-1.2, -12.0], [16.0, -1.6]], dtype=torch.float64)
    bias.grad = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    optimizer.step()
    expected = torch.tensor([[2.265, 0.12], [-0.16, 3.02]], dtype=torch.float64)
    assert (weight - expected).abs().max() < 2e-15
    assert (bias - torch.tensor([0.275, -4.45], dtype=torch.float64)).abs().max() < 2e-15


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1.5e-6, 0.3])
@pytest.mark.parametrize("trust", [1e-3, 0.02])
def test_ten_steps_of_mixed_shapes_follow_the_loop(momentum, weight_decay, trust):
    params = parameters()
    loops = [Loop(p, momentum, weight_decay, trust) for p in params]
    optimizer = LARS(params, lr=1.0, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        hand_out(params, gradients(step))
        optimizer.step()
        for loop, gradient in zip(loops, gradients(step), strict=True):
            loop.step(gradient, lr)
        largest = max(abs(x) for loop in loops for x in loop.p)
        assert difference(params, loops) < TIGHT * max(1, largest)


def test_the_defaults_are_those_of_the_paper():
    params = parameters()
    optimizer = LARS(params)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["trust_coefficient"]) == (
        0.2,
        0.9,
        1.5e-6,
        1e-3,
    )


def test_the_rate_is_outside_the_momentum():
    """The variant with the rate inside agrees while the rate is constant, and is told apart when it changes."""
    for rates, agree in (([0.5] * 6, True), ([0.5, 0.5, 2.0, 2.0, 0.1, 0.1], False)):
        params = parameters()
        outside, inside = ([Loop(p, 0.9, 0.1, 0.02, lr_inside) for p in params] for lr_inside in (False, True))
        optimizer = LARS(params, lr=1.0, momentum=0.9, weight_decay=0.1, trust_coefficient=0.02)
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            hand_out(params, gradients(step))
            optimizer.step()
            for loop, gradient in zip(outside + inside, 2 * gradients(step), strict=True):
                loop.step(gradient, lr)
        assert difference(params, outside) < 1e-11
        assert (difference(params, inside) < 1e-11) == agree
        for kind in (True, False):  # weights and others each
            chosen = [(p, loop) for p, loop in zip(params, inside) if loop.adapted == kind]
            assert (difference(*map(list, zip(*chosen))) < 1e-3) == agree


def test_biases_and_norms_have_neither_decay_nor_adaptation():
    bias, scale = parameters(shapes=[(4,), ()])
    before = copies([bias, scale])
    optimizer = LARS([bias, scale], lr=0.5, momentum=0.0, weight_decay=10.0, trust_coefficient=1e-3)
    hand_out([bias, scale], gradients(0, [(4,), ()]))
    optimizer.step()
    for parameter, old, gradient in zip([bias, scale], before, gradients(0, [(4,), ()])):
        assert (parameter - (old - 0.5 * gradient)).abs().max() < 1e-14


def test_the_length_of_a_step_is_the_trust_coefficient_times_that_of_the_weight():
    (weight,) = parameters(shapes=[(6, 5)])
    before = weight.detach().clone()
    optimizer = LARS([weight], lr=1.0, momentum=0.9, weight_decay=0.2, trust_coefficient=1e-3)
    hand_out([weight], gradients(0, [(6, 5)]))
    optimizer.step()
    assert abs((weight - before).norm() / before.norm() - 1e-3) < 1e-15


def test_a_zero_weight_moves_by_its_gradient():
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    optimizer = LARS([weight], lr=0.5, momentum=0.9, weight_decay=0.1, trust_coefficient=1e-3)
    (gradient,) = gradients(0, [(2, 3)])
    hand_out([weight], [gradient])
    optimizer.step()
    assert torch.equal(weight.detach(), -0.5 * gradient)


def test_a_zero_gradient_leaves_the_weight_to_its_momentum():
    (weight,) = parameters(shapes=[(2, 3)])
    optimizer = LARS([weight], lr=0.5, momentum=0.9, weight_decay=0.0, trust_coefficient=0.1)
    hand_out([weight], gradients(0, [(2, 3)]))
    before = weight.detach().clone()
    optimizer.step()
    first = weight.detach() - before
    hand_out([weight], [torch.zeros(2, 3, dtype=torch.float64)])
    optimizer.step()
    assert ((weight - before) - 1.9 * first).abs().max() < 1e-15
    assert first.abs().max() > 1e-3

    (untouched,) = parameters(shapes=[(2, 3)])
    before = untouched.detach().clone()
    optimizer = LARS([untouched], lr=0.5, momentum=0.9, weight_decay=0.0)
    hand_out([untouched], [torch.zeros(2, 3, dtype=torch.float64)])
    optimizer.step()
    assert torch.equal(untouched.detach(), before)


def test_decay_alone_shrinks_by_the_trust_coefficient():
    """With no gradient g is the decay, of length weight_decay |p|, so that the step is trust_coefficient p."""
    (weight,) = parameters(shapes=[(2, 3)])
    before = weight.detach().clone()
    optimizer = LARS([weight], lr=0.5, momentum=0.0, weight_decay=1e-4, trust_coefficient=0.01)
    hand_out([weight], [torch.zeros(2, 3, dtype=torch.float64)])
    optimizer.step()
    assert (weight - before * (1 - 0.5 * 0.01)).abs().max() < 1e-15


@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_the_scale_of_the_loss_matters_to_biases_only(factor):
    shapes = [(2, 3), (3,), (4, 2, 3, 3)]
    plain, scaled = parameters(shapes=shapes), parameters(shapes=shapes)
    for params, times in ((plain, 1.0), (scaled, factor)):
        optimizer = LARS(params, lr=0.3, momentum=0.9, weight_decay=0.0, trust_coefficient=0.01)
        for step in range(4):
            hand_out(params, gradients(step, shapes), times)
            optimizer.step()
    start = parameters(shapes=shapes)
    for index in (0, 2):
        assert (plain[index] - scaled[index]).abs().max() < TIGHT
        assert (plain[index] - start[index]).abs().max() > 1e-4
    moved, moved_scaled = plain[1] - start[1], scaled[1] - start[1]
    assert (moved_scaled / moved - factor).abs().max() < 1e-6 * factor


def test_a_scaled_loss_matters_to_weights_when_there_is_decay():
    plain, scaled = parameters(shapes=[(2, 3)]), parameters(shapes=[(2, 3)])
    for params, times in ((plain, 1.0), (scaled, 0.01)):
        optimizer = LARS(params, lr=0.3, weight_decay=0.5, trust_coefficient=0.1)
        hand_out(params, gradients(0, [(2, 3)]), times)
        optimizer.step()
    assert (plain[0] - scaled[0]).abs().max() > 1e-3


@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_clipped_rate_is_bounded_by_lr_and_not_multiplied(by_tensor):
    """Rates far below and far above what is adapted to, and none."""
    params = parameters()
    loops = [Loop(p, 0.9, 0.1, 0.02, clip=True) for p in params]
    optimizer = LARS(params, lr=1.0, weight_decay=0.1, trust_coefficient=0.02, clip=True)
    for step, lr in enumerate([0.0, 1e-6, 1e-3, 0.3, 10.0]):
        optimizer.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64) if by_tensor else lr
        grads = gradients(step)
        hand_out(params, grads)
        optimizer.step()
        for loop, gradient in zip(loops, grads, strict=True):
            loop.step(gradient, lr)
        assert difference(params, loops) < TIGHT
    (weight,) = parameters(shapes=[(6, 5)])
    before = weight.detach().clone()
    hand_out([weight], gradients(0, [(6, 5)]))
    LARS([weight], lr=10.0, weight_decay=0.0, trust_coefficient=0.02, clip=True).step()
    assert abs((weight - before).norm() / before.norm() - 0.02) < 1e-15  # the same at every rate above it


def test_the_rate_may_be_a_tensor():
    plain, by_tensor = parameters(), parameters()
    rate = torch.tensor(1.0, dtype=torch.float64)
    optimizer, with_tensor = LARS(plain, lr=1.0, weight_decay=0.1), LARS(by_tensor, lr=rate, weight_decay=0.1)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        rate.fill_(lr)
        for params, each in ((plain, optimizer), (by_tensor, with_tensor)):
            hand_out(params, gradients(step))
            each.step()
        for a, b in zip(plain, by_tensor):
            assert (a - b).abs().max() < TIGHT
    assert (plain[0] - parameters()[0]).abs().max() > 1e-4


def test_parameters_without_gradient_are_left_alone():
    params = parameters()
    before = copies(params)
    optimizer = LARS(params, lr=1.0, weight_decay=0.1)
    hand_out(params, gradients(0))
    params[0].grad = params[1].grad = None
    optimizer.step()
    for index, (parameter, old) in enumerate(zip(params, before)):
        assert torch.equal(parameter.detach(), old) == (index in (0, 1))
        assert (parameter in optimizer.state) == (index not in (0, 1))
    for parameter in params:
        parameter.grad = None
    before = copies(params)
    optimizer.step()
    assert all(torch.equal(parameter.detach(), old) for parameter, old in zip(params, before))


def test_gradients_are_not_written_to():
    params = parameters()
    hand_out(params, gradients(0))
    LARS(params, lr=1.0, weight_decay=0.1).step()
    for parameter, gradient in zip(params, gradients(0)):
        assert torch.equal(parameter.grad, gradient)


def test_a_saved_state_goes_on_identically():
    params = parameters()
    optimizer = LARS(params, lr=1.5, momentum=0.8, weight_decay=0.1, trust_coefficient=0.02)
    for step in range(3):
        hand_out(params, gradients(step))
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed_params, forgetful_params = ([nn.Parameter(p) for p in copies(params)] for _ in range(2))
    resumed = LARS(resumed_params)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    forgetful = LARS(forgetful_params, lr=1.5, momentum=0.8, weight_decay=0.1, trust_coefficient=0.02)
    for step in range(3, 6):
        for chosen, each in ((params, optimizer), (resumed_params, resumed), (forgetful_params, forgetful)):
            hand_out(chosen, gradients(step))
            each.step()
        for a, b, c in zip(params, resumed_params, forgetful_params):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)


def test_a_closure_is_called_once_with_gradients_enabled():
    (weight,) = parameters(shapes=[(2, 3)])
    expected = nn.Parameter(weight.detach().clone())
    optimizer, other = LARS([weight], lr=0.5), LARS([expected], lr=0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    value = float((weight.detach() ** 2).sum())
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == value
    expected.grad = 2 * expected.detach()
    assert other.step() is None
    assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, "lr must not be negative, got -0.1"),
        ({"lr": torch.tensor(-1.0)}, "lr must not be negative, got -1"),
        ({"weight_decay": -1e-6}, "weight_decay must not be negative"),
        ({"trust_coefficient": -1e-3}, "trust_coefficient must not be negative"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0.1"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LARS(parameters(), **arguments)


# Variants


class Larc:
    """apex's LARC around SGD for one parameter, number by number. In its words: the adaptive rate is the trust
    coefficient times |p| over |g| + weight decay * |p| + 1e-8; where both norms are nonzero, the gradient with decay is
    multiplied by it, else it stays as it is. Clipped, the rate is min(adaptive rate, lr). Then SGD, without decay."""

    def __init__(self, parameter: Tensor, momentum: float, weight_decay: float, trust: float, clip: bool = False):
        self.p = [float(x) for x in parameter.detach().flatten()]
        self.buffer: list[float] | None = None
        self.momentum, self.weight_decay, self.trust, self.clip = momentum, weight_decay, trust, clip

    def step(self, gradient: Tensor, lr: float) -> None:
        g, decay = [float(x) for x in gradient.flatten()], self.weight_decay
        if length(self.p) != 0 and length(g) != 0:
            rate = self.trust * length(self.p) / (length(g) + decay * length(self.p) + 1e-8)
            rate = min(rate / lr, 1.0) if self.clip else rate
            g = [rate * (gi + decay * pi) for gi, pi in zip(g, self.p)]
        self.sgd(g, lr)

    def sgd(self, g: list[float], lr: float) -> None:
        self.buffer = g if self.buffer is None else [self.momentum * b + gi for b, gi in zip(self.buffer, g)]
        self.p = [pi - lr * b for pi, b in zip(self.p, self.buffer)]


LARC = {"separate_norms": True, "adapt_all": True, "decay_all": True}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-6, 0.3])
def test_larc_of_all_parameters_is_that_of_apex(weight_decay, clip):
    params = parameters()
    with torch.no_grad():
        params[1].zero_()  # a shift that starts at zero moves by its gradient
    loops = [Larc(p, 0.9, weight_decay, 1e-3, clip) for p in params]
    optimizer = LARS(params, momentum=0.9, weight_decay=weight_decay, trust_coefficient=1e-3, clip=clip, **LARC)
    for step, lr in enumerate(RATES[1:]):
        grads = gradients(step)
        grads[2] *= step != 3  # a weight without gradient keeps its momentum and has no decay
        optimizer.param_groups[0]["lr"] = lr
        hand_out(params, grads)
        optimizer.step()
        for loop, gradient in zip(loops, grads, strict=True):
            loop.step(gradient, lr)
    assert difference(params, loops) < TIGHT


def test_larc_without_biases_and_norms_leaves_them_to_sgd():
    """solo-learn's LARS: the ratio of LARC, clipped, for weights alone."""
    params = parameters()
    loops = [Larc(p, 0.9, 1e-4, 0.02, clip=True) for p in params]
    optimizer = LARS(params, weight_decay=1e-4, trust_coefficient=0.02, clip=True, separate_norms=True)
    for step, lr in enumerate(RATES[1:]):
        optimizer.param_groups[0]["lr"] = lr
        hand_out(params, gradients(step))
        optimizer.step()
        for parameter, loop, gradient in zip(params, loops, gradients(step), strict=True):
            if parameter.ndim > 1:
                loop.step(gradient, lr)
            else:
                loop.sgd([float(x) for x in gradient.flatten()], lr)
    assert difference(params, loops) < TIGHT


def test_norms_are_separate_or_joint():
    """A gradient against the weight: |g| + decay |p| is 5 + 2, |g + decay p| is 5 - 2."""
    for separate, ratio in ((True, 1 / (7 + 1e-8)), (False, 1 / 3)):
        weight = nn.Parameter(torch.tensor([[4.0]], dtype=torch.float64))
        weight.grad = torch.tensor([[-5.0]], dtype=torch.float64)
        LARS([weight], lr=1.0, weight_decay=0.5, trust_coefficient=0.25, separate_norms=separate).step()
        assert weight.item() == pytest.approx(4 - ratio * -3, rel=1e-15)


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("adapt_all", [False, True])
def test_decay_and_adaptation_of_biases_are_two_things(adapt_all, decay_all):
    bias = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    bias.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    expected = bias.grad + (0.5 if decay_all else 0.0) * bias.detach()
    expected = expected * (0.1 * 5 / expected.norm() if adapt_all else 1.0)
    wanted = bias.detach() - 2.0 * expected
    options = {"adapt_all": adapt_all, "decay_all": decay_all}
    LARS([bias], lr=2.0, weight_decay=0.5, trust_coefficient=0.1, **options).step()
    assert (bias - wanted).abs().max() < 1e-15


@pytest.mark.parametrize("options", [{}, LARC, {"clip": True, "separate_norms": True}])
def test_a_step_brings_no_value_to_the_host(options):
    params = parameters()
    optimizer = LARS(params, lr=torch.tensor(0.5), **options)
    hand_out(params, gradients(0))
    with Watched() as watched:
        optimizer.step()
    assert watched.asked == []


def test_a_state_from_before_the_variants_goes_on():
    params = parameters()
    optimizer = LARS(params, lr=0.5)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for option in ("clip", *LARC):
            del group[option]
    optimizer.load_state_dict(state)
    hand_out(params, gradients(0))
    optimizer.step()


# Groups


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)).double()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.5, dtype=torch.float64)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2, 2, dtype=torch.float64), requires_grad=False))
    return model


def settings(name: str, **values) -> OptimizerConfig:
    return OptimizerConfig(name=name, weight_decay=0.1, one_dimensional_lr_ratio=0.25, **values)


def stepped_without_gradient(model, optimizer, lr):
    """Make a step that only decays; the parameters before it."""
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    return before


@pytest.mark.parametrize(("name", "kind"), [("lars", LARS), ("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_only_weights_are_decayed_and_frozen_parameters_are_left_out(name, kind):
    model = network()
    optimizer = build_optimizer(model, settings(name))
    assert type(optimizer) is kind
    weights, others = optimizer.param_groups
    named = {id(parameter): key for key, parameter in model.named_parameters()}
    assert {named[id(p)] for p in weights["params"]} == {"0.weight", "3.weight"}
    assert {named[id(p)] for p in others["params"]} == {"0.bias", "1.weight", "1.bias", "3.bias", "temperature"}
    assert (weights["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (weights["lr_ratio"], others["lr_ratio"]) == (1.0, 0.25)

    before = stepped_without_gradient(model, optimizer, 0.5)
    for key, parameter in model.named_parameters():
        if key in ("0.weight", "3.weight"):
            shrink = 0.5 * (1e-3 if name == "lars" else 0.1)
            assert (parameter - before[key] * (1 - shrink)).abs().max() < 1e-15
        else:
            assert torch.equal(parameter, before[key])


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_every_group_gets_its_share_of_the_rate(name):
    model = network()
    optimizer = build_optimizer(model, settings(name, lr=0.7))
    for lr in (0.0, 0.5, 3.2):
        set_learning_rate(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, 0.25 * lr]


def test_all_parameters_decay_if_asked():
    model = network()
    optimizer = build_optimizer(model, settings("sgd", decay_all=True, momentum=0.0))
    before = stepped_without_gradient(model, optimizer, 0.5)
    for key, parameter in model.named_parameters():
        ratio = 0.0 if key == "frozen" else 1.0 if key in ("0.weight", "3.weight") else 0.25
        assert (parameter - before[key] * (1 - 0.5 * ratio * 0.1)).abs().max() < 1e-15


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_a_module_with_a_fixed_rate_keeps_the_peak(name):
    model = network()
    optimizer = build_optimizer(model, settings(name), peak_lr=0.8, fixed_rate=(model[3],))
    for lr in (0.0, 0.5, 3.2):
        set_learning_rate(optimizer, lr)
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        named = {key: rates[id(p)] for key, p in model.named_parameters() if p.requires_grad}
        assert (named.pop("3.weight"), named.pop("3.bias")) == (0.8, 0.2)
        assert named.pop("0.weight") == lr
        assert set(named.values()) == {0.25 * lr}


def test_a_saved_state_leaves_fixed_rates_as_they_are():
    model = network()
    optimizer = build_optimizer(model, settings("sgd"), peak_lr=0.8, fixed_rate=(model[3],))
    state = copy.deepcopy(optimizer.state_dict())
    fresh = build_optimizer(model, settings("sgd"), peak_lr=0.8, fixed_rate=(model[3],))
    load_optimizer(fresh, state)
    set_learning_rate(fresh, 0.1)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.25 * 0.1, 0.8, 0.25 * 0.8]


def test_the_optimiser_of_a_recipe_steps_by_its_settings():
    model = network()
    config = settings("lars", momentum=0.6, trust_coefficient=0.05)
    optimizer = build_optimizer(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    loops = [Loop(p, 0.6, 0.1, 0.05) for p in trained]
    shapes = [tuple(p.shape) for p in trained]
    for step, lr in enumerate([0.5, 2.0, 0.3]):
        set_learning_rate(optimizer, lr)
        hand_out(trained, gradients(step, shapes))
        optimizer.step()
        for loop, gradient in zip(loops, gradients(step, shapes), strict=True):
            loop.step(gradient, lr if loop.adapted else 0.25 * lr)
    assert difference(trained, loops) < 1e-11


def test_sgd_and_adamw_take_their_settings():
    sgd = build_optimizer(network(), settings("sgd", momentum=0.7, nesterov=True))
    assert {(group["momentum"], group["nesterov"]) for group in sgd.param_groups} == {(0.7, True)}
    adamw = build_optimizer(network(), settings("adamw", betas=(0.8, 0.95)))
    assert {group["betas"] for group in adamw.param_groups} == {(0.8, 0.95)}


def test_a_group_without_parameters_is_not_made():
    groups = parameter_groups(nn.Linear(3, 2, bias=False), settings("lars"))
    assert [len(group["params"]) for group in groups] == [1]
    build_optimizer(nn.Linear(3, 2, bias=False), settings("sgd"))
