"""TiCo's loss against Algorithm 1 written out: value, both readings of the gradient, identities, memory and errors.

The oracles are loops over plain numbers or the pseudo-code as it is printed; everything is in float64 unless the
test is about precision.
"""

import copy
import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tico_ssl import TiCoLoss, tico_loss
from tico_ssl.runtime import distributed

TIGHT = 1e-12
some_examples = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**16)
batches = st.integers(2, 6)
dims = st.integers(1, 5)
rhos = st.floats(0, 20)
betas = st.floats(0, 0.99)
readings = st.booleans()


def embeddings(seed: int, n: int, d: int) -> Tensor:
    """Raw embeddings in random directions, with lengths from 0.5 to 2."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((n, d))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return torch.from_numpy(rows * generator.uniform(0.5, 2, (n, 1)))


def covariance_matrix(seed: int, d: int, trace: float = 0.7) -> Tensor:
    """What some steps may have left: symmetric, positive semi-definite, of a given trace."""
    factor = torch.from_numpy(np.random.default_rng(seed + 7).standard_normal((d, d + 2)))
    matrix = factor @ factor.T
    return trace * matrix / matrix.trace()


def unit(row) -> list[float]:
    length = math.sqrt(sum(x * x for x in row))
    return [x / length for x in row]


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def loops(online, target, covariance, rho: float, beta: float, source: str = "online"):
    """Invariance, contrast and updated covariance of section 3.1, number by number."""
    z_1, z_2 = [unit(row) for row in online], [unit(row) for row in target]
    n, d = len(z_1), len(z_1[0])
    z = z_1 if source == "online" else z_2
    updated = [[0.0] * d for _ in range(d)]
    for a in range(d):
        for b in range(d):
            batch = sum(z[i][a] * z[i][b] for i in range(n)) / n
            updated[a][b] = beta * covariance[a][b] + (1 - beta) * batch
    distance = sum(dot([p - q for p, q in zip(u, v)], [p - q for p, q in zip(u, v)]) for u, v in zip(z_1, z_2))
    invariance = distance / (2 * n)
    contrast = 0.0
    for i in range(n):
        for a in range(d):
            for b in range(d):
                contrast += rho / n * z_1[i][a] * updated[a][b] * z_1[i][b]
    return invariance, contrast, updated


def printed(z_1: Tensor, z_2: Tensor, previous: Tensor, rho: float, beta: float, hold_batch: bool) -> Tensor:
    """The pseudo-code as printed, with the 1 of the equations; the previous covariance is a constant."""
    n = z_1.shape[0]
    z_1 = F.normalize(z_1, dim=1)
    z_2 = F.normalize(z_2.detach(), dim=1)
    B = torch.mm(z_1.T, z_1) / n
    if hold_batch:
        B = B.detach()
    C = beta * previous.detach() + (1 - beta) * B
    return 1 - (z_1 * z_2).sum(dim=1).mean() + rho * (torch.mm(z_1, C) * z_1).sum(dim=1).mean()


def gradient_of(function, online: Tensor) -> Tensor:
    """By autograd, at a fresh leaf."""
    leaf = online.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


def differences_of(function, online: Tensor, h: float = 1e-3) -> Tensor:
    """Central differences of fourth order."""
    gradient = torch.zeros_like(online)
    for position in np.ndindex(*online.shape):

        def moved(by: float, position=position) -> float:
            shifted = online.detach().clone()
            shifted[position] += by
            return float(function(shifted))

        gradient[position] = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    return gradient


def assert_close(actual, expected, tolerance: float = TIGHT) -> None:
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance


# Value


@given(
    seed=seeds,
    n=batches,
    d=dims,
    rho=rhos,
    beta=betas,
    steps=st.integers(1, 4),
    source=st.sampled_from(["online", "target"]),
)
@some_examples
def test_value_and_covariance_follow_the_loops_over_several_steps(seed, n, d, rho, beta, steps, source):
    covariance = torch.zeros(d, d, dtype=torch.float64)
    expected_covariance = [[0.0] * d for _ in range(d)]
    for step in range(steps):
        online, target = embeddings(seed + 2 * step, n, d), embeddings(seed + 2 * step + 1, n, d)
        terms = tico_loss(online, target, covariance, rho=rho, beta=beta, source=source)
        invariance, contrast, expected_covariance = loops(
            online.tolist(), target.tolist(), expected_covariance, rho, beta, source
        )
        covariance = terms.covariance
        assert_close(terms.invariance, invariance)
        assert_close(terms.contrast, contrast)
        assert_close(terms.loss, invariance + contrast)
        assert_close(covariance, expected_covariance)


def test_value_of_a_step_worked_out_by_hand():
    # z1 = (1, 0), (0.6, 0.8); z2 = (0, 1), (0.6, 0.8); cosines 0 and 1, so the invariance is 0.5.
    # B = [[0.68, 0.24], [0.24, 0.32]]; C = B / 2 + [[0.5, 0], [0, 0]] / 2 = [[0.59, 0.12], [0.12, 0.16]].
    # z1 C z1 = 0.59 and 0.36 * 0.59 + 0.96 * 0.12 + 0.64 * 0.16 = 0.43; their mean is 0.51.
    online = torch.tensor([[2.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    target = torch.tensor([[0.0, 5.0], [0.6, 0.8]], dtype=torch.float64)
    previous = torch.tensor([[0.5, 0.0], [0.0, 0.0]], dtype=torch.float64)
    terms = tico_loss(online, target, previous, rho=10.0, beta=0.5)
    assert_close(terms.invariance, 0.5, 1e-15)
    assert_close(terms.contrast, 5.1, 1e-14)
    assert_close(terms.loss, 5.6, 1e-14)
    assert_close(terms.covariance, [[0.59, 0.12], [0.12, 0.16]], 1e-15)


def test_the_paper_s_constants_are_the_defaults():
    online, target, previous = embeddings(0, 5, 4), embeddings(1, 5, 4), covariance_matrix(0, 4)
    invariance, contrast, updated = loops(online.tolist(), target.tolist(), previous.tolist(), rho=8.0, beta=0.9)
    terms = tico_loss(online, target, previous)
    assert_close(terms.loss, invariance + contrast)
    assert_close(terms.covariance, updated)
    assert_close(
        gradient_of(lambda z: tico_loss(z, target, previous).loss, online),
        gradient_of(lambda z: printed(z, target, previous, 8.0, 0.9, hold_batch=False), online),
    )
    criterion = TiCoLoss()
    assert criterion.covariance.shape == (256, 256)
    assert (criterion.rho, criterion.beta, criterion.detach, criterion.source) == (8.0, 0.9, False, "online")


@given(seed=seeds, n=batches, d=dims, rho=rhos, beta=betas)
@some_examples
def test_the_terms_sum_to_the_loss_and_the_reading_does_not_change_the_value(seed, n, d, rho, beta):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    live = tico_loss(online, target, previous, rho=rho, beta=beta, detach=False)
    held = tico_loss(online, target, previous, rho=rho, beta=beta, detach=True)
    assert_close(live.loss, live.invariance + live.contrast, 1e-14)
    for a, b in zip(live, held):
        assert_close(a, b)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("source", ["online", "target"])
def test_no_gradient_reaches_the_covariance_the_target_or_the_step_before(detach, source):
    online = embeddings(0, 4, 3).requires_grad_()
    target = embeddings(1, 4, 3).requires_grad_()
    previous = covariance_matrix(0, 3).requires_grad_()
    terms = tico_loss(online, target, previous, detach=detach, source=source)
    assert not terms.covariance.requires_grad
    assert terms.covariance.grad_fn is None
    gradients = torch.autograd.grad(terms.loss, [online, target, previous], allow_unused=True)
    assert gradients[0].abs().max() > 0.01
    assert gradients[1] is None
    assert gradients[2] is None


def test_the_given_covariance_is_not_written_to():
    previous = covariance_matrix(0, 3)
    before = previous.clone()
    terms = tico_loss(embeddings(0, 4, 3), embeddings(1, 4, 3), previous)
    assert torch.equal(previous, before)
    assert not torch.equal(terms.covariance, before)


# Gradient


@given(seed=seeds, n=batches, d=st.integers(2, 5), rho=rhos, beta=betas, detach=readings)
@some_examples
def test_gradient_is_that_of_the_printed_algorithm(seed, n, d, rho, beta, detach):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    actual = gradient_of(lambda z: tico_loss(z, target, previous, rho=rho, beta=beta, detach=detach).loss, online)
    expected = gradient_of(lambda z: printed(z, target, previous, rho, beta, hold_batch=detach), online)
    assert_close(actual, expected)


@given(seed=seeds, n=batches, d=st.integers(2, 5), rho=rhos, beta=betas, detach=readings)
@some_examples
def test_gradient_is_the_closed_form_projected_on_the_sphere(seed, n, d, rho, beta, detach):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    actual = gradient_of(lambda z: tico_loss(z, target, previous, rho=rho, beta=beta, detach=detach).loss, online)

    z_1 = np.array([unit(row) for row in online.tolist()])
    z_2 = np.array([unit(row) for row in target.tolist()])
    B = sum(np.outer(z, z) for z in z_1) / n
    times = 1 if detach else 2
    for i in range(n):
        on_sphere = -z_2[i] / n + 2 * rho / n * (beta * previous.numpy() + times * (1 - beta) * B) @ z_1[i]
        tangent = on_sphere - np.dot(on_sphere, z_1[i]) * z_1[i]
        assert_close(actual[i], torch.from_numpy(tangent / np.linalg.norm(online[i])))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("source", ["online", "target"])
def test_gradient_agrees_with_finite_differences_of_the_value(seed, beta, source):
    online, target, previous = embeddings(seed, 4, 3), embeddings(seed + 1, 4, 3), covariance_matrix(seed, 3)

    def value(z: Tensor) -> Tensor:
        return tico_loss(z, target, previous, rho=8.0, beta=beta, source=source).loss

    assert_close(gradient_of(value, online), differences_of(value, online), 1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_detached_gradient_agrees_with_finite_differences_at_a_fixed_batch_covariance(beta):
    online, target, previous = embeddings(3, 4, 3), embeddings(4, 4, 3), covariance_matrix(3, 3)
    *_, updated = loops(online.tolist(), target.tolist(), previous.tolist(), 8.0, beta)

    def value_at_fixed_covariance(z: Tensor) -> float:
        pairs = [(unit(a), unit(b)) for a, b in zip(z.tolist(), target.tolist())]
        return sum(1 - dot(a, b) + 8.0 * dot(a, [dot(row, a) for row in updated]) for a, b in pairs) / len(pairs)

    actual = gradient_of(lambda z: tico_loss(z, target, previous, rho=8.0, beta=beta, detach=True).loss, online)
    assert_close(actual, differences_of(value_at_fixed_covariance, online), 1e-8)


def test_the_two_readings_differ_by_the_batch_covariance_once():
    online, target, previous = embeddings(0, 5, 4), embeddings(1, 5, 4), covariance_matrix(0, 4)
    live, held = (
        gradient_of(lambda z, detach=detach: tico_loss(z, target, previous, 8.0, 0.9, detach).loss, online)
        for detach in (False, True)
    )
    constant = F.normalize(online, dim=1)
    constant = constant.T @ constant / 5
    once = gradient_of(lambda z: 8.0 * 0.1 * ((F.normalize(z) @ constant) * F.normalize(z)).sum(1).mean(), online)
    assert_close(live - held, once)
    assert once.abs().max() > 1e-3


def test_without_memory_the_gradient_is_that_of_the_squared_frobenius_norm():
    online, target = embeddings(0, 5, 4), embeddings(1, 5, 4)
    zero = torch.zeros(4, 4, dtype=torch.float64)

    def frobenius(z: Tensor) -> Tensor:
        z = F.normalize(z, dim=1)
        return 8.0 * (z.T @ z / 5).square().sum()

    terms = tico_loss(online, target, zero, rho=8.0, beta=0.0)
    assert_close(terms.contrast, frobenius(online))
    actual = gradient_of(lambda z: tico_loss(z, target, zero, rho=8.0, beta=0.0).contrast, online)
    assert_close(actual, gradient_of(frobenius, online))


@given(seed=seeds, rho=rhos, beta=betas, detach=readings, source=st.sampled_from(["online", "target"]))
@some_examples
def test_processes_that_share_a_batch_have_its_loss_and_gradient(seed, rho, beta, detach, source):
    """Each process has a part of the batch and the mean of their covariances; DDP takes the mean of their gradients."""
    online, target, previous = embeddings(seed, 6, 3), embeddings(seed + 1, 6, 3), covariance_matrix(seed, 3)
    settings_ = {"rho": rho, "beta": beta, "detach": detach, "source": source}
    whole = tico_loss(online, target, previous, **settings_)
    whole_gradient = gradient_of(lambda z: tico_loss(z, target, previous, **settings_).loss, online)

    z = F.normalize(online if source == "online" else target, dim=1)
    shared = torch.stack([part.T @ part / 2 for part in z.split(2)]).mean(dim=0)

    def of_process(part: Tensor, other: Tensor):
        return tico_loss(part, other, previous, **settings_, average=lambda matrix: shared)

    parts = list(zip(online.split(2), target.split(2), strict=True))
    results = [of_process(part, other) for part, other in parts]
    gradients = [gradient_of(lambda z, other=other: of_process(z, other).loss, part) for part, other in parts]
    for name in ("loss", "invariance", "contrast"):
        assert_close(torch.stack([getattr(result, name) for result in results]).mean(), getattr(whole, name))
    for result, (part, _) in zip(results, parts):
        assert_close(result.covariance, whole.covariance)
        own = F.normalize(part, dim=1)
        assert_close(result.contrast, rho * sum(z @ whole.covariance @ z for z in own) / 2)
    assert_close(torch.cat(gradients) / 3, whole_gradient)


# Known values


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.99])
def test_trace_of_the_covariance_is_one_minus_beta_to_the_t(beta):
    criterion = TiCoLoss(4, beta=beta).double()
    for t in range(1, 31):
        criterion(embeddings(t, 3, 4), embeddings(t + 100, 3, 4))
        assert_close(criterion.covariance.trace(), 1 - beta**t, 1e-14)


@pytest.mark.parametrize("rho", [0.0, 1.0, 8.0])
def test_full_collapse_costs_rho(rho):
    direction = embeddings(0, 1, 5)
    lengths = torch.linspace(0.1, 3, 6, dtype=torch.float64).view(-1, 1)
    criterion = TiCoLoss(5, rho=rho, beta=0.9).double()
    for t in range(1, 401):
        terms = criterion.terms(direction * lengths, direction * lengths.flip(0))
        assert_close(terms.loss, rho * (1 - 0.9**t), 1e-13)
    assert_close(terms.loss, rho)


@pytest.mark.parametrize("d", [2, 5, 16])
def test_embeddings_that_fill_all_directions_equally_cost_rho_over_d(d):
    rotation = torch.linalg.qr(embeddings(d, d, d)).Q
    isotropic = torch.eye(d, dtype=torch.float64) / d
    terms = tico_loss(rotation, rotation, isotropic, rho=8.0, beta=0.9)
    assert_close(terms.invariance, 0.0, 1e-14)
    assert_close(terms.contrast, 8.0 / d, 1e-14)
    assert_close(terms.covariance, isotropic, 1e-15)

    criterion = TiCoLoss(d, rho=8.0, beta=0.5).double()
    for t in range(1, 61):
        assert_close(criterion.terms(rotation, rotation).contrast, 8.0 / d * (1 - 0.5**t), 1e-14)
    assert_close(criterion.covariance, isotropic, 1e-15)


@given(seed=seeds, n=batches, d=dims, rho=rhos, beta=betas, alike=st.floats(0, 100))
@some_examples
def test_contrast_stays_within_its_bounds(seed, n, d, rho, beta, alike):
    """`alike` adds a common direction, from scattered (0) to nearly collapsed embeddings."""
    criterion = TiCoLoss(d, rho=rho, beta=beta).double()
    common = alike * embeddings(seed, 1, d)
    for t in range(1, 5):
        terms = criterion.terms(common + embeddings(seed + t, n, d), common + embeddings(seed + t + 50, n, d))
        assert rho * (1 - beta) / min(n, d) - TIGHT <= terms.contrast <= rho * (1 - beta**t) + TIGHT
        assert -TIGHT <= terms.invariance <= 2 + TIGHT


def test_the_lower_bound_is_reached_by_an_orthonormal_first_batch():
    rows = torch.linalg.qr(embeddings(0, 6, 6)).Q
    zero = torch.zeros(6, 6, dtype=torch.float64)
    assert_close(tico_loss(rows, rows, zero, rho=8.0, beta=0.9).contrast, 8.0 * (1 - 0.9) / 6, 1e-14)
    assert_close(tico_loss(rows[:4], rows[:4], zero, rho=8.0, beta=0.9).contrast, 8.0 * (1 - 0.9) / 4, 1e-14)


def test_opposite_embeddings_have_invariance_two():
    online = embeddings(0, 4, 3)
    assert_close(tico_loss(online, -3 * online, torch.zeros(3, 3, dtype=torch.float64)).invariance, 2.0, 1e-14)


# The implicit memory bank


@given(seed=seeds, sizes=st.lists(batches, min_size=1, max_size=4), d=dims, rho=rhos, beta=betas, detach=readings)
@some_examples
def test_contrast_is_the_squared_contrastive_loss_over_a_bank_of_all_past_embeddings(seed, sizes, d, rho, beta, detach):
    """The bank holds the embeddings of every step s with weight (1 - beta) beta^(t - s) / n."""
    for source in ("online", "target"):
        covariance = torch.zeros(d, d, dtype=torch.float64)
        bank: list[tuple[int, Tensor]] = []
        for t, n in enumerate(sizes, start=1):
            online, target = embeddings(seed + t, n, d), embeddings(seed + t + 50, n, d)

            def squared(z: Tensor, t=t, target=target, source=source, bank=tuple(bank)) -> Tensor:
                z = F.normalize(z, dim=1)
                current = (z.detach() if detach else z) if source == "online" else F.normalize(target, dim=1)
                total = torch.zeros((), dtype=torch.float64)
                for s, past in (*bank, (t, current)):
                    weight = (1 - beta) * beta ** (t - s) / len(past)
                    for i in range(len(z)):
                        for j in range(len(past)):
                            total = total + rho / len(z) * weight * (z[i] @ past[j]) ** 2
                return total

            def contrast(z: Tensor, target=target, covariance=covariance, source=source) -> Tensor:
                return tico_loss(z, target, covariance, rho, beta, detach, source).contrast

            assert_close(contrast(online), squared(online))
            assert_close(gradient_of(contrast, online), gradient_of(squared, online))
            covariance = tico_loss(online, target, covariance, rho, beta, detach, source).covariance
            bank.append((t, F.normalize(online if source == "online" else target, dim=1)))


# Options and memory of the module


def test_target_embeddings_as_source_of_the_covariance():
    online, target, previous = embeddings(0, 5, 4), embeddings(1, 5, 4), covariance_matrix(0, 4)
    z_2 = F.normalize(target, dim=1)
    expected = 0.9 * previous + 0.1 * z_2.T @ z_2 / 5
    live, held = (tico_loss(online, target, previous, detach=detach, source="target") for detach in (False, True))
    assert_close(live.covariance, expected, 1e-15)
    for a, b in zip(live, held):
        assert torch.equal(a, b)
    gradients = [
        gradient_of(
            lambda z, detach=detach: tico_loss(z, target, previous, detach=detach, source="target").loss, online
        )
        for detach in (False, True)
    ]
    assert torch.equal(*gradients)
    assert (live.contrast - tico_loss(online, target, previous).contrast).abs() > 1e-3


@pytest.mark.parametrize("source", ["online", "target"])
@pytest.mark.parametrize("detach", [False, True])
def test_module_is_the_function_with_a_memory(source, detach):
    criterion = TiCoLoss(4, rho=5.0, beta=0.7, detach=detach, source=source).double()
    covariance = torch.zeros(4, 4, dtype=torch.float64)
    for step in range(5):
        online, target = embeddings(step, 6, 4), embeddings(step + 50, 6, 4)
        expected = tico_loss(online, target, covariance, 5.0, 0.7, detach, source)
        expected_gradient = gradient_of(
            lambda z, t=target, c=covariance: tico_loss(z, t, c, 5.0, 0.7, detach, source).loss, online
        )
        leaf = online.clone().requires_grad_()
        if step % 2:
            terms = criterion.terms(leaf, target)
            loss = terms.loss
            assert torch.equal(terms.contrast, expected.contrast)
        else:
            loss = criterion(leaf, target)
        loss.backward()
        assert torch.equal(loss, expected.loss)
        assert torch.equal(leaf.grad, expected_gradient)
        covariance = expected.covariance
        assert torch.equal(criterion.covariance, covariance)
        assert not criterion.covariance.requires_grad


def test_evaluation_mode_measures_without_moving_the_covariance():
    criterion = TiCoLoss(4).double()
    criterion(embeddings(0, 6, 4), embeddings(1, 6, 4))
    before = criterion.covariance.clone()
    criterion.eval()
    online, target = embeddings(2, 6, 4), embeddings(3, 6, 4)
    first, second = criterion(online, target), criterion(online, target)
    assert torch.equal(criterion.covariance, before)
    assert torch.equal(first, second)
    assert_close(first, tico_loss(online, target, before).loss, 0.0)
    criterion.train()
    criterion(online, target)
    assert not torch.equal(criterion.covariance, before)


def test_evaluation_mode_asks_no_other_process(monkeypatch):
    """So that one process alone may measure."""
    monkeypatch.setattr(distributed, "all_mean", None)
    criterion = TiCoLoss(dim=3).eval()
    assert criterion(torch.randn(4, 3), torch.randn(4, 3)).isfinite()


def test_a_saved_memory_goes_on_identically():
    criterion = TiCoLoss(4).double()
    for step in range(3):
        criterion(embeddings(step, 6, 4), embeddings(step + 50, 6, 4))
    file = io.BytesIO()
    torch.save(criterion.state_dict(), file)
    file.seek(0)
    resumed = TiCoLoss(4).double()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    fresh = TiCoLoss(4).double()
    for step in range(3, 6):
        pair = embeddings(step, 6, 4), embeddings(step + 50, 6, 4)
        expected = criterion(*pair)
        assert torch.equal(resumed(*pair), expected)
        assert not torch.equal(fresh(*pair), expected)
    assert torch.equal(resumed.covariance, criterion.covariance)


def test_the_buffer_follows_its_module_between_precisions():
    criterion = TiCoLoss(3)
    assert list(criterion.state_dict()) == ["covariance"]
    assert list(criterion.parameters()) == []
    assert criterion.covariance.dtype == torch.float32
    assert torch.equal(criterion.covariance, torch.zeros(3, 3))
    assert criterion.to(torch.float64) is criterion
    loss = criterion(embeddings(0, 4, 3), embeddings(1, 4, 3))
    assert loss.dtype == torch.float64
    assert criterion.covariance.dtype == torch.float64
    *_, expected = loops(embeddings(0, 4, 3).tolist(), embeddings(1, 4, 3).tolist(), [[0.0] * 3] * 3, 8.0, 0.9)
    assert_close(criterion.covariance, expected, 1e-15)
    twin = copy.deepcopy(criterion)
    twin(embeddings(2, 4, 3), embeddings(3, 4, 3))
    assert_close(criterion.covariance, expected, 1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("detach", [False, True])
def test_autocast_does_not_lower_the_precision_of_the_loss(dtype, detach):
    inside, outside = TiCoLoss(16, detach=detach), TiCoLoss(16, detach=detach)
    for step in range(3):
        online, target = (embeddings(seed, 32, 16).to(dtype) for seed in (step, step + 50))
        low = online.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            terms = inside.terms(low, target)
        assert {term.dtype for term in terms} == {torch.float32}
        high = online.float().requires_grad_()
        expected = outside.terms(high, target.float())
        for a, b in zip(terms, expected):
            assert torch.equal(a, b)
        terms.loss.backward()
        expected.loss.backward()
        assert low.grad.dtype == dtype
        assert torch.equal(low.grad, high.grad.to(dtype))
        assert inside.covariance.dtype == torch.float32
        assert torch.equal(inside.covariance, outside.covariance)


def test_low_precision_embeddings_are_measured_in_float32_without_autocast():
    online, target = (embeddings(seed, 32, 16).bfloat16() for seed in (0, 1))
    terms = tico_loss(online, target, torch.zeros(16, 16))
    for actual, expected in zip(terms, tico_loss(online.float(), target.float(), torch.zeros(16, 16))):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)


# Invariances


@given(seed=seeds, n=batches, d=dims, rho=rhos, beta=betas, exponent=st.floats(-3, 3))
@some_examples
def test_lengths_of_embeddings_do_not_matter(seed, n, d, rho, beta, exponent):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    lengths = 10.0 ** (exponent * torch.linspace(-1, 1, n, dtype=torch.float64).view(-1, 1))
    plain = tico_loss(online, target, previous, rho=rho, beta=beta)
    scaled = tico_loss(online * lengths, target * lengths.flip(0), previous, rho=rho, beta=beta)
    for a, b in zip(plain, scaled):
        assert_close(a, b)


@given(seed=seeds, n=batches, d=st.integers(2, 5), rho=rhos, beta=betas, source=st.sampled_from(["online", "target"]))
@some_examples
def test_a_rotation_of_the_whole_space_does_not_matter(seed, n, d, rho, beta, source):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    rotation = torch.linalg.qr(embeddings(seed + 2, d, d)).Q
    plain = tico_loss(online, target, previous, rho=rho, beta=beta, source=source)
    turned = tico_loss(
        online @ rotation.T, target @ rotation.T, rotation @ previous @ rotation.T, rho=rho, beta=beta, source=source
    )
    for name in ("loss", "invariance", "contrast"):
        assert_close(getattr(plain, name), getattr(turned, name))
    assert_close(rotation @ plain.covariance @ rotation.T, turned.covariance)


@given(seed=seeds, n=batches, d=dims)
@some_examples
def test_the_order_of_the_images_does_not_matter_but_the_pairing_does(seed, n, d):
    online, target, previous = embeddings(seed, n, d), embeddings(seed + 1, n, d), covariance_matrix(seed, d)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    plain, shuffled = tico_loss(online, target, previous), tico_loss(online[order], target[order], previous)
    for a, b in zip(plain, shuffled):
        assert_close(a, b)
    unpaired = tico_loss(online[order], target, previous)
    assert_close(unpaired.contrast, plain.contrast)
    cosines = (F.normalize(online[order]) * F.normalize(target)).sum(dim=1)
    assert_close(unpaired.invariance, 1 - cosines.mean())


# Errors


@pytest.mark.parametrize(
    ("online", "target", "size", "message"),
    [
        ((4, 3), (5, 3), 3, r"\(4, 3\) and \(5, 3\)"),
        ((4, 3), (4, 2), 3, r"\(4, 3\) and \(4, 2\)"),
        ((3,), (3,), 3, r"must both be \(batch, dim\)"),
        ((4, 3, 1), (4, 3, 1), 3, r"must both be \(batch, dim\)"),
        ((4, 3), (3,), 3, r"must both be \(batch, dim\)"),
        ((0, 3), (0, 3), 3, "empty"),
        ((1, 3), (1, 3), 3, "at least two images"),
        ((4, 3), (4, 3), 5, r"3 dimensions, the covariance is \(5, 5\)"),
    ],
)
def test_wrong_shapes_are_named(online, target, size, message):
    with pytest.raises(ValueError, match=message):
        tico_loss(torch.ones(online), torch.ones(target), torch.zeros(size, size))
    criterion = TiCoLoss(size)
    with pytest.raises(ValueError, match=message):
        criterion(torch.ones(online), torch.ones(target))
    assert torch.equal(criterion.covariance, torch.zeros(size, size))


def test_a_covariance_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"covariance is \(3, 4\)"):
        tico_loss(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(3, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoilt", ["online", "target"])
def test_nan_and_infinity_are_reported_unless_the_check_is_off(value, spoilt):
    pair = {"online": embeddings(0, 4, 3), "target": embeddings(1, 4, 3)}
    pair[spoilt][2, 1] = value
    zero = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="NaN or infinity"):
        tico_loss(**pair, covariance=zero)
    criterion = TiCoLoss(3).double()
    with pytest.raises(ValueError, match="NaN or infinity"):
        criterion(**pair)
    assert torch.equal(criterion.covariance, zero)
    assert tico_loss(**pair, covariance=zero, check_finite=False).loss.isnan()
    assert TiCoLoss(3, check_finite=False).double()(**pair).isnan()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be positive, got 0"),
        ({"dim": -4}, "dim must be positive, got -4"),
        ({"rho": -0.1}, "rho must not be negative, got -0.1"),
        ({"beta": -0.1}, r"beta must be in \[0, 1\), got -0.1"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\), got nan"),
        ({"source": "both"}, "source must be 'online' or 'target', got 'both'"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TiCoLoss(**arguments)
