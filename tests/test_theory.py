"""The paper's claims hold where their conditions do, and fail where these do not. All in float64."""

import doctest
import inspect
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tico_ssl import theory, tico_loss
from tico_ssl.methods.barlow_twins import barlow_twins_loss, off_diagonal
from tico_ssl.methods.squared_contrastive import squared_contrastive_loss
from tico_ssl.methods.vicreg import vicreg_loss

TIGHT = 1e-12
DOCUMENT = Path(__file__).parent.parent / "docs" / "theory.md"
some_examples = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**16)
counts = st.integers(2, 7)
dims = st.integers(1, 6)
rhos = st.floats(0, 20)
betas = st.floats(0, 0.99)
readings = st.booleans()


def random(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def units(seed: int, *shape: int) -> Tensor:
    return F.normalize(random(seed, *shape), dim=-1)


def identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def memory(seed: int, d: int, trace: float = 0.7) -> Tensor:
    """What some steps may have left: symmetric, positive semi-definite, of a given trace."""
    factor = random(seed + 7, d + 2, d)
    return trace * factor.T @ factor / factor.square().sum()


def assert_close(actual: object, expected: object, tolerance: float = TIGHT) -> None:
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance


def differ(one: Tensor, other: Tensor, by: float = 1e-3) -> bool:
    return float((one - other).abs().max()) > by


def gradient(function, at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


# The remark: Gram matrix and covariance


@given(seed=seeds, n=counts, d=dims)
@some_examples
def test_gram_and_covariance_share_non_zero_eigenvalues_trace_and_norm(seed, n, d):
    z = random(seed, n, d)
    C, K, shared = theory.second_moment(z), theory.gram(z), theory.shared_eigenvalues(z)
    assert len(shared) == min(n, d)
    for matrix in (C, K):
        eigenvalues = torch.linalg.eigvalsh(matrix).flip(0)
        assert_close(eigenvalues[: len(shared)], shared)
        assert (eigenvalues[len(shared) :].abs() <= TIGHT).all()
        assert_close(matrix.trace(), shared.sum())
        assert_close(matrix.square().sum(), shared.square().sum(), 1e-11)


@pytest.mark.parametrize(("n", "d"), [(3, 5), (5, 3)])
def test_they_do_not_share_the_eigenvalue_zero(n, d):
    """The discussion's 'always share the same eigenvalues' needs n = d."""
    z = random(0, n, d)
    smallest = [float(torch.linalg.eigvalsh(matrix)[0]) for matrix in (theory.second_moment(z), theory.gram(z))]
    assert min(smallest) == pytest.approx(0, abs=TIGHT)
    assert max(smallest) > 1e-3


def test_between_two_views_traces_agree_and_norms_do_not():
    """The remark is about one Z: for z'_i . z''_j and the cross-correlation it does not hold."""
    z_1, z_2 = units(0, 6, 4), units(1, 6, 4)
    similarities, correlations = z_1 @ z_2.T, z_1.T @ z_2
    assert_close(similarities.trace(), correlations.trace())
    assert differ(similarities.square().sum(), correlations.square().sum(), 0.5)
    own = theory.second_moment(z_1) * theory.second_moment(z_2)
    assert_close(similarities.square().mean(), own.sum())  # what the similarities do equal


@given(seed=seeds, n=counts, d=dims)
@some_examples
def test_the_duality_of_off_diagonals_needs_the_diagonals(seed, n, d):
    z = random(seed, n, d)
    parts = theory.duality(z)
    assert_close(parts.gram_off + parts.gram_diagonal, parts.covariance_off + parts.covariance_diagonal, 1e-11)
    assert_close(theory.duality(F.normalize(z, dim=1)).gram_diagonal, 1 / n)
    assert_close(n**2 * theory.duality(theory.unit_columns(z)).covariance_diagonal, d)


def test_off_diagonals_alone_differ_and_depend_on_the_axes():
    z = units(0, 6, 4)
    rotation = torch.linalg.eigh(theory.second_moment(z)).eigenvectors
    before, after = theory.duality(z), theory.duality(z @ rotation)
    assert differ(before.gram_off, before.covariance_off)
    assert_close(before.gram_off, after.gram_off)
    assert float(before.covariance_off) > 0.05
    assert_close(after.covariance_off, 0)


# Bounds of the norm, and who reaches them


@given(seed=seeds, n=counts, d=dims, alike=st.floats(0, 1))
@some_examples
def test_the_norm_of_unit_rows_stays_within_its_bounds(seed, n, d, alike):
    z = F.normalize(units(seed, n, d) + 50 * alike * units(seed + 1, d), dim=1)
    low, high = theory.frobenius_bounds(n, d)
    C = theory.second_moment(z)
    assert_close(C.trace(), 1)
    assert low - TIGHT <= float(C.square().sum()) <= high + TIGHT
    assert_close(theory.participation_ratio(C), 1 / C.square().sum(), 1e-11)


@pytest.mark.parametrize(("n", "d"), list(itertools.product(range(1, 9), range(1, 9))))
def test_the_most_spread_rows_reach_the_least_norm(n, d):
    z = theory.most_spread(n, d)
    assert z.shape == (n, d)
    assert_close(z.norm(dim=1), torch.ones(n))
    assert_close(theory.second_moment(z).square().sum(), theory.frobenius_bounds(n, d)[0])
    if n >= d:
        assert_close(theory.second_moment(z), identity(d) / d)
    if n <= d:
        assert_close(theory.gram(z), identity(n) / n)


def test_fewer_rows_than_dimensions_cannot_reach_the_papers_bound():
    n, d = 4, 9
    z = theory.most_spread(n, d)
    C = theory.second_moment(z)
    assert float(C.square().sum()) == pytest.approx(1 / n)
    assert 1 / n > 1 / d + 0.1
    assert torch.linalg.matrix_rank(C) == n  # so it is no multiple of the identity
    assert differ(C, identity(d) / d)


def test_one_direction_reaches_the_largest_norm():
    z = units(0, 1, 5).expand(4, 5)
    assert_close(theory.second_moment(z).square().sum(), theory.frobenius_bounds(4, 5)[1])


def test_without_unit_rows_there_is_no_bound():
    """The discussion's constraint: without it, shrinking everything is the solution."""
    z = units(0, 6, 4)
    norms = [float(theory.second_moment(scale * z).square().sum()) for scale in (1.0, 0.1, 0.01)]
    assert norms[1] == pytest.approx(norms[0] * 1e-4)
    assert norms[2] < theory.frobenius_bounds(6, 4)[0] / 1e6


@pytest.mark.parametrize(("n", "d"), [(3, 6), (5, 5), (9, 4)])
def test_descending_the_contrast_finds_the_bound(n, d):
    z = units(3, n, d)
    nothing = torch.zeros(d, d, dtype=torch.float64)
    for _ in range(1000):
        slope = gradient(lambda rows: tico_loss(rows, rows, nothing, rho=1.0, beta=0.0).contrast, z)
        z = F.normalize(z - n * min(n, d) / 8 * slope, dim=1)
    assert float(theory.second_moment(z).square().sum()) == pytest.approx(theory.frobenius_bounds(n, d)[0], abs=1e-9)


# The memory


def run(history_1: Tensor, history_2: Tensor, rho: float, beta: float, detach: bool, source):
    """The last step of several, as a function of its online embeddings, and the covariance after it."""
    covariance = torch.zeros(history_1.shape[2], history_1.shape[2], dtype=torch.float64)
    for online, target in zip(history_1[:-1], history_2[:-1]):
        covariance = tico_loss(online, target, covariance, rho, beta, detach, source).covariance
    return lambda online: tico_loss(online, history_2[-1], covariance, rho, beta, detach, source)


@given(seed=seeds, n=counts, d=dims, steps=st.integers(1, 5), rho=rhos, beta=betas)
@some_examples
def test_tico_is_the_squared_contrastive_loss_with_an_exponential_bank(seed, n, d, steps, rho, beta):
    """In value for both sources; in gradient too where the bank is constant, as a bank is."""
    history_1, history_2 = units(seed, steps, n, d), units(seed + 1, steps, n, d)
    for source, keys in (("online", history_1), ("target", history_2)):
        bank = theory.exponential_bank(keys, beta)
        assert bank.shape == (steps * n, d)

        def squared(online: Tensor, bank=bank) -> Tensor:
            return squared_contrastive_loss(online, history_2[-1], bank, rho, leave_out_own=False).loss

        for detach in (True, False):
            step = run(history_1, history_2, rho, beta, detach, source)
            assert_close(step(history_1[-1]).covariance, theory.second_moment(bank))
            assert_close(step(history_1[-1]).loss, 1 + squared(history_1[-1]))
            if detach or source == "target":
                slope = gradient(lambda online, step=step: step(online).loss, history_1[-1])
                assert_close(slope, gradient(squared, history_1[-1]))


def test_every_condition_of_that_equality_is_needed():
    history_1, history_2 = units(0, 3, 4, 5), units(1, 3, 4, 5)
    online, target, beta = history_1[-1], history_2[-1], 0.6
    step = run(history_1, history_2, 8.0, beta, False, "online")
    loss = step(online).loss

    def squared(bank: Tensor, own: bool = False) -> Tensor:
        return 1 + squared_contrastive_loss(online, target, bank, leave_out_own=own).loss

    bank = theory.exponential_bank(history_1, beta)
    assert_close(squared(bank), loss)
    assert differ(squared(history_1.flatten(0, 1)), loss)  # equal weights
    assert differ(squared(theory.exponential_bank(history_1[:-1], beta)), loss)  # without the present batch
    assert differ(squared(theory.exponential_bank(history_2, beta)), loss)  # the other network's embeddings
    assert differ(squared(theory.exponential_bank(1.1 * history_1, beta)), loss)  # longer than unit vectors
    assert differ(squared(bank, own=True), loss)  # the own key left out
    slope = gradient(lambda rows: squared_contrastive_loss(rows, target, bank, leave_out_own=False).loss, online)
    assert differ(slope, gradient(lambda rows: step(rows).loss, online))  # the gradient, with B attached


def test_a_plain_bank_is_a_plain_average():
    online, target, keys = units(0, 4, 5), units(1, 4, 5), units(2, 9, 5)
    by_pairs = 8.0 / 4 / 9 * sum(float(z @ key) ** 2 for z in online for key in keys)
    C = theory.second_moment(keys)
    assert_close(by_pairs, 8.0 * ((online @ C) * online).sum(dim=1).mean())
    assert_close(squared_contrastive_loss(online, target, keys, 8.0, leave_out_own=False).contrast, by_pairs)


@given(beta=betas, steps=st.integers(1, 40))
@some_examples
def test_weights_and_lengths_of_the_memory(beta, steps):
    weights = theory.exponential_weights(beta, steps)
    assert_close(weights.sum(), 1 - beta**steps)
    assert_close(weights.sum() ** 2 / weights.square().sum(), theory.memory_length(beta, steps), 1e-9)
    assert 1 - TIGHT <= theory.memory_length(beta, steps) <= min(steps, theory.memory_length(beta)) + 1e-9


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.98])
def test_the_memory_in_the_long_run(beta):
    weights = theory.exponential_weights(beta, 3000)
    ages = torch.arange(2999, -1, -1)
    assert_close((weights * ages).sum(), theory.mean_age(beta), 1e-9)
    assert theory.memory_length(beta, 3000) == pytest.approx(theory.memory_length(beta))
    n, d = 64, 16
    bank_numbers = n * theory.memory_length(beta) * d
    assert theory.memory_saving(n, d, beta) == pytest.approx(bank_numbers / d**2)


def test_the_memory_of_the_papers_settings():
    assert theory.memory_length(0.9) == pytest.approx(19)
    assert theory.mean_age(0.9) == pytest.approx(9)
    assert theory.memory_length(0.0) == 1


@given(beta=st.floats(0.5, 0.95))
@some_examples
def test_the_length_is_that_of_equal_variance(beta):
    """A scalar of variance one, averaged with the weights of C over their sum, has variance one over the length."""
    weights = theory.exponential_weights(beta, 2000)
    variance = (weights / weights.sum()).square().sum()
    assert_close(variance, 1 / theory.memory_length(beta), 1e-9)


# Values


@given(seed=seeds, n=counts, d=dims)
@some_examples
def test_invariance_is_half_the_squared_distance_of_unit_vectors(seed, n, d):
    online, target = random(seed, n, d), random(seed + 1, n, d)
    z_1, z_2 = F.normalize(online, dim=1), F.normalize(target, dim=1)
    invariance = tico_loss(online, target, torch.zeros(d, d, dtype=torch.float64)).invariance
    assert_close(theory.half_squared_distance(z_1, z_2), invariance)
    assert_close(theory.half_squared_distance(z_1, z_2), 1 - (z_1 * z_2).sum(dim=1).mean())


def test_that_needs_unit_vectors_and_a_plus():
    z_1, z_2 = units(0, 4, 5), units(1, 4, 5)
    distance = theory.half_squared_distance(2 * z_1, 2 * z_2)
    assert differ(distance, 1 - (4 * z_1 * z_2).sum(dim=1).mean())
    same, opposite = (-theory.half_squared_distance(z_1, sign * z_1) for sign in (1, -1))
    assert opposite < same  # with the printed minus, opposite views would be the best


@given(seed=seeds, n=counts, d=dims, rho=rhos, beta=betas, steps=st.integers(1, 5))
@some_examples
def test_contrast_stays_within_its_bounds(seed, n, d, rho, beta, steps):
    contrast = run(units(seed, steps, n, d), units(seed, steps, n, d), rho, beta, False, "online")(
        units(seed + 1, n, d)
    ).contrast
    low, high = theory.contrast_bounds(n, d, rho, beta, steps)
    assert low - TIGHT <= float(contrast) <= high + TIGHT


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_bounds_are_reached(steps):
    same = units(0, 1, 1, 5).expand(steps, 4, 5)
    terms = run(same, same, 8.0, 0.9, False, "online")(same[-1])
    assert_close(terms.loss, theory.contrast_bounds(4, 5, 8.0, 0.9, steps)[1])
    assert_close(terms.invariance, 0)
    spread = theory.most_spread(7, 5)
    first = tico_loss(spread, spread, torch.zeros(5, 5, dtype=torch.float64), 8.0, 0.9).contrast
    assert_close(first, theory.contrast_bounds(7, 5, 8.0, 0.9, 1)[0])


@pytest.mark.parametrize("steps", [1, 2])
def test_expected_contrast_is_the_mean_over_all_that_can_be_drawn(steps):
    """Three vectors, two images in a batch: every history is gone through."""
    vectors, n, rho, beta = units(0, 3, 4), 2, 8.0, 0.7
    total, count = 0.0, 0
    for drawn in itertools.product(range(3), repeat=n * steps):
        history = vectors[list(drawn)].view(steps, n, 4)
        total += float(run(history, history, rho, beta, False, "online")(history[-1]).contrast)
        count += 1
    spread = float(theory.second_moment(vectors).square().sum())
    assert total / count == pytest.approx(theory.expected_contrast(spread, n, rho, beta, steps), abs=TIGHT)


def test_expected_contrast_in_the_long_run():
    late = theory.expected_contrast(0.2, 5, 8.0, 0.9, 2000)
    assert theory.expected_contrast(0.2, 5, 8.0, 0.9) == pytest.approx(late)
    assert theory.expected_contrast(1.0, 5, 8.0, 0.9) == pytest.approx(8.0)  # collapse, whatever n
    endless = theory.expected_contrast(1 / 256, 10**12, 8.0, 0.9)
    assert endless == pytest.approx(8 / 256)  # rho over d, only where batches are large
    assert theory.expected_contrast(1 / 256, 64, 8.0, 0.9) > 1.3 * endless


# The gradient


@given(seed=seeds, n=counts, d=dims, rho=rhos, beta=betas, detach=readings)
@some_examples
def test_the_closed_form_is_the_gradient(seed, n, d, rho, beta, detach):
    online, target, covariance = 2 * random(seed, n, d), random(seed + 1, n, d), memory(seed, d)
    online = online + 0.3 * online.sign()  # away from zero, where directions are lost
    slope = gradient(lambda rows: tico_loss(rows, target, covariance, rho, beta, detach).loss, online)
    assert_close(theory.tico_gradient(online, target, covariance, rho, beta, detach), slope, 1e-11)


def algorithm_1(z_1: Tensor, z_2: Tensor, C: Tensor, rho: float, beta: float) -> tuple[Tensor, Tensor]:
    """As it is printed: without any stop of the gradient."""
    z_1, z_2 = F.normalize(z_1, dim=1), F.normalize(z_2, dim=1)
    B = torch.mm(z_1.T, z_1) / len(z_1)
    C = beta * C + (1 - beta) * B
    return -(z_1 * z_2).sum(dim=1).mean() + rho * (torch.mm(z_1, C) * z_1).sum(dim=1).mean(), C


def test_the_printed_algorithm_takes_one_step_and_the_code_follows_it():
    online, target, zero = random(0, 4, 3).requires_grad_(), random(1, 4, 3), torch.zeros(3, 3, dtype=torch.float64)
    loss, C = algorithm_1(online, target, zero, 8.0, 0.9)
    loss.backward()
    terms = tico_loss(online, target, zero, 8.0, 0.9)
    assert_close(terms.loss, loss + 1)  # the equations' constant
    assert_close(online.grad, theory.tico_gradient(online, target, zero, 8.0, 0.9).detach())
    again, _ = algorithm_1(online, target, C, 8.0, 0.9)
    with pytest.raises(RuntimeError, match="second time"):  # through the covariance, into the step before
        again.backward()


@given(seed=seeds, n=counts, d=dims, rho=rhos, beta=betas)
@some_examples
def test_the_attached_gradient_is_a_detached_one_with_other_settings(seed, n, d, rho, beta):
    online, target, covariance = units(seed, n, d), units(seed + 1, n, d), memory(seed, d)
    other = theory.detached_equivalent(rho, beta)
    attached = theory.tico_gradient(online, target, covariance, rho, beta)
    assert_close(attached, theory.tico_gradient(online, target, covariance, *other, detach=True), 1e-11)


def test_how_much_the_reading_matters():
    online, target = units(0, 5, 4), units(1, 5, 4)
    settled = theory.second_moment(online)
    for beta in (0.0, 0.5, 0.9):
        attached = theory.tico_gradient(online, target, settled, 8.0, beta)
        scaled = theory.tico_gradient(online, target, settled, 8.0 * (2 - beta), beta, detach=True)
        assert_close(attached, scaled)  # where B is C, it is a matter of rho
        detached = theory.tico_gradient(online, target, settled, 8.0, beta, detach=True)
        assert differ(attached, detached)
    without_memory = gradient(lambda rows: 8.0 * theory.second_moment(F.normalize(rows, dim=1)).square().sum(), online)
    contrast = gradient(lambda rows: tico_loss(rows, target, settled, 8.0, 0.0).contrast, online)
    assert_close(contrast, without_memory)


@given(seed=seeds, n=counts, d=st.integers(2, 6), time=st.floats(0.01, 5))
@some_examples
def test_the_flow_descends_the_contrast(seed, n, d, time):
    z, C = units(seed, n, d), memory(seed, d)
    later = theory.contrast_flow(z, C, time)
    assert_close(later.norm(dim=1), torch.ones(n))
    assert_close(theory.contrast_flow(later, C, time), theory.contrast_flow(z, C, 2 * time), 1e-10)
    before, after = (((rows @ C) * rows).sum(dim=1) for rows in (z, later))
    assert (after <= before + TIGHT).all()


def test_the_flow_is_that_of_the_gradient_and_of_each_eigenvector():
    z, C, h = units(0, 4, 5), memory(0, 5), 1e-5
    velocity = (theory.contrast_flow(z, C, h) - theory.contrast_flow(z, C, -h)) / (2 * h)
    frozen = gradient(lambda rows: ((F.normalize(rows, dim=1) @ C) * F.normalize(rows, dim=1)).sum() / 2, z)
    assert_close(velocity, -frozen, 1e-9)
    eigenvalues, eigenvectors = torch.linalg.eigh(C)
    seen = ((z @ C) * z).sum(dim=1, keepdim=True)
    assert_close(velocity @ eigenvectors, (seen - eigenvalues) * (z @ eigenvectors), 1e-9)


def test_the_flow_ends_in_the_emptiest_direction_unless_it_starts_on_an_axis():
    C = memory(0, 5)
    eigenvectors = torch.linalg.eigh(C).eigenvectors
    gaps = torch.linalg.eigvalsh(C)
    end = theory.contrast_flow(units(1, 3, 5), C, 60 / float(gaps[1] - gaps[0]))
    assert_close((end @ eigenvectors[:, 0]).abs(), torch.ones(3))
    assert_close(theory.contrast_flow(eigenvectors.T, C, 3.0), eigenvectors.T)


@given(seed=seeds, n=counts, d=st.integers(2, 6), rho=rhos, beta=betas, detach=readings)
@some_examples
def test_collapse_is_a_stationary_point_with_this_growth(seed, n, d, rho, beta, detach):
    v = units(seed, 1, d)
    collapsed, covariance = v.expand(n, d), v.T @ v
    assert_close(theory.tico_gradient(collapsed, collapsed, covariance, rho, beta, detach), torch.zeros(n, d))
    deviation = random(seed + 1, n, d)
    deviation = deviation - (deviation @ v.T) * v  # along the sphere
    together, apart = deviation.mean(dim=0, keepdim=True), deviation - deviation.mean(dim=0)

    def growth_of(direction: Tensor) -> Tensor:
        def slope(h: float) -> Tensor:
            return theory.tico_gradient(F.normalize(v + h * direction, dim=1), collapsed, covariance, rho, beta, detach)

        return n * (slope(-1e-5) - slope(1e-5)) / 2e-5

    growth = theory.collapse_growth(rho, beta, detach)
    assert_close(growth_of(apart), growth * apart, 1e-6)
    assert_close(growth_of(together.expand(n, d)), (2 * rho * beta - 1) * together.expand(n, d), 1e-6)


@pytest.mark.parametrize(("detach", "critical"), [(False, 1 / 2.2), (True, 0.5)])
def test_collapse_is_left_only_with_enough_contrast(detach, critical):
    """Descent on free embeddings from almost one point, the target and the memory staying there."""
    assert theory.collapse_growth(critical, 0.9, detach) == pytest.approx(0)
    v = units(0, 1, 6)
    deviation = 1e-4 * random(1, 8, 6)
    start = F.normalize(v + deviation - deviation.mean(dim=0), dim=1)
    for rho, leaves in ((1.2 * critical, True), (0.8 * critical, False)):
        z = start
        for _ in range(200):
            z = F.normalize(z - 0.8 * theory.tico_gradient(z, v.expand(8, 6), v.T @ v, rho, 0.9, detach), dim=1)
        distance = [float((rows - rows.mean(dim=0)).norm()) for rows in (start, z)]
        assert (distance[1] > 10 * distance[0]) == leaves
        assert (distance[1] < 0.1 * distance[0]) != leaves


# The squared contrastive loss, InfoNCE, Barlow Twins and VICReg


@given(seed=seeds, n=counts, d=dims, rho=rhos)
@some_examples
def test_the_squared_loss_is_a_norm_of_the_covariance(seed, n, d, rho):
    z_1, z_2 = units(seed, n, d), units(seed + 1, n, d)
    pairs = sum(float(z_1[i] @ z_1[j]) ** 2 for i in range(n) for j in range(n) if j != i)
    alike = float((z_1 * z_2).sum()) / n
    by_covariance = theory.squared_loss_by_covariance(z_1, z_2, rho)
    assert_close(by_covariance, -alike + rho / n**2 * pairs)
    assert_close(theory.squared_loss_by_covariance(z_1, z_1, rho), squared_contrastive_loss(z_1, z_1, rho=rho).loss)
    unscaled = n * theory.second_moment(z_1)
    printed = -alike - rho + rho / n * float(unscaled.square().sum())
    assert_close(printed + alike, n * (float(by_covariance) + alike), 1e-10)  # the factor n that the paper has lost


def test_views_can_be_exchanged_in_the_mean_only_and_if_they_are_drawn_alike():
    """Each of two images has two views. All draws: of both views from one distribution, and of the second shifted."""
    views = units(0, 2, 2, 4)

    def mean_square(chances_1: tuple[float, ...], chances_2: tuple[float, ...]) -> float:
        return sum(
            chances_1[a] * chances_2[b] * float(views[0, a] @ views[1, b]) ** 2 for a in range(2) for b in range(2)
        )

    same, other = (0.3, 0.7), (0.9, 0.1)
    squared = 0.0
    for a, b, c, e in itertools.product(range(2), repeat=4):
        z_1, z_2 = torch.stack([views[0, a], views[1, b]]), torch.stack([views[0, c], views[1, e]])
        chance = same[a] * same[b] * same[c] * same[e]
        squared += chance * float(squared_contrastive_loss(z_1, z_2, rho=1.0).contrast)
    assert squared == pytest.approx(2 / 4 * mean_square(same, same))
    assert abs(mean_square(same, other) - mean_square(same, same)) > 1e-2
    z_1, z_2 = views[:, 0], views[:, 1]
    difference = squared_contrastive_loss(z_1, z_2).loss - theory.squared_loss_by_covariance(z_1, z_2)
    assert float(difference.abs()) > 1e-2  # of one draw


def test_the_squared_loss_cannot_tell_a_vector_from_its_opposite_and_infonce_can():
    z = units(0, 5, 4)
    flipped = z * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)[:, None]
    assert_close(theory.second_moment(flipped), theory.second_moment(z))
    assert_close(squared_contrastive_loss(flipped, flipped).loss, squared_contrastive_loss(z, z).loss)
    assert_close(theory.shared_eigenvalues(flipped), theory.shared_eigenvalues(z))
    assert differ(theory.info_nce_loss(flipped, flipped, 0.2), theory.info_nce_loss(z, z, 0.2))


@given(seed=seeds, n=counts, d=dims, temperature=st.floats(0.1, 2))
@some_examples
def test_infonce_is_the_sum_as_printed(seed, n, d, temperature):
    z_1, z_2 = units(seed, n, d), units(seed + 1, n, d)
    total = 0.0
    for i in range(n):
        similarities = [float(z_1[i] @ z_2[j]) for j in range(n)]
        total += -similarities[i] + temperature * math.log(sum(math.exp(s / temperature) for s in similarities))
    assert_close(theory.info_nce_loss(z_1, 3 * z_2, temperature), total / n)


@given(seed=seeds, m=st.integers(2, 8), rho=rhos, temperature=st.floats(0.1, 2))
@some_examples
def test_the_pushes_are_slopes(seed, m, rho, temperature):
    cosines = random(seed, m).clamp(-1, 1)
    assert_close(theory.squared_push(cosines, rho), gradient(lambda s: rho * s.square().mean(), cosines))
    slope = gradient(lambda s: temperature * (s / temperature).logsumexp(dim=0), cosines)
    assert_close(theory.info_nce_push(cosines, temperature), slope)


def test_one_rests_where_keys_are_orthogonal_and_the_other_where_they_are_opposite():
    cosines = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
    assert theory.squared_push(cosines).sign().tolist() == [1, 0, -1]
    assert (theory.info_nce_push(cosines, 0.2) > 0).all()


def correlation(z_1: Tensor, z_2: Tensor) -> Tensor:
    return theory.unit_columns(z_1).T @ theory.unit_columns(z_2)


@given(seed=seeds, n=st.integers(3, 7), d=st.integers(1, 6), rho=st.floats(0, 2))
@some_examples
def test_barlow_twins_in_terms_of_images(seed, n, d, rho):
    """Exact for one view twice; for two views, but for the redundancy that was exchanged."""
    z_1, z_2 = 1e5 * random(seed, n, d), 1e5 * random(seed + 1, n, d)  # so large that 1e-5 in BatchNorm is nothing
    assert_close(theory.barlow_twins_by_gram(z_1, z_1, rho), barlow_twins_loss(z_1, z_1, rho).loss / d, 1e-10)
    within, between = (off_diagonal(correlation(z_1, z)).square().sum() for z in (z_1, z_2))
    difference = theory.barlow_twins_by_gram(z_1, z_2, rho) - barlow_twins_loss(z_1, z_2, rho).loss / d
    assert_close(difference, rho / d * (within - between), 1e-10)


def test_for_two_views_that_is_something_else():
    z_1, z_2 = 1e5 * random(0, 6, 4), 1e5 * random(1, 6, 4)
    assert differ(theory.barlow_twins_by_gram(z_1, z_2, 0.5), barlow_twins_loss(z_1, z_2, 0.5).loss / 4)


def test_the_squares_on_the_diagonal_leave_the_optimum_and_change_the_pull():
    """Barlow Twins' (1 - c)^2 against the 1 - 2c that would be left without c^2, for all correlations."""
    c = torch.linspace(-1, 1, 201, dtype=torch.float64)
    with_squares, without = (1 - c).square(), 1 - 2 * c
    assert with_squares.argmin() == without.argmin() == 200
    assert_close(gradient(lambda x: (1 - x).square().sum(), c)[-1], 0)
    assert_close(gradient(lambda x: (1 - 2 * x).sum(), c)[-1], -2)


@given(seed=seeds, n=st.integers(3, 8), d=st.integers(1, 6), scale=st.floats(0.01, 3))
@some_examples
def test_vicreg_keeps_the_spectrum_from_vanishing(seed, n, d, scale):
    z = scale * random(seed, n, d)
    covariance = z.T.cov().view(d, d)
    eigenvalues = torch.linalg.eigvalsh(covariance)
    assert_close(eigenvalues.sum(), z.var(dim=0).sum(), 1e-11)
    hinge = float(vicreg_loss(z, z, variance_weight=1.0).variance)
    assert float(eigenvalues.sum()) >= theory.vicreg_least_trace(hinge, d) - 1e-11
    off = vicreg_loss(z, z, covariance_weight=1.0).covariance / 2 * d
    assert_close(off, eigenvalues.square().sum() - z.var(dim=0).square().sum(), 1e-10)


def test_that_floor_is_reached_by_equal_deviations():
    z = theory.unit_columns(random(0, 7, 4)) * 0.5 * math.sqrt(6)  # deviations of 0.5
    hinge = float(vicreg_loss(z, z, variance_weight=1.0).variance)
    assert float(z.var(dim=0).sum()) == pytest.approx(theory.vicreg_least_trace(hinge, 4))
    assert theory.vicreg_least_trace(1.0, 4) == 0


def test_vicregs_covariance_term_is_no_function_of_eigenvalues():
    """Turning the axes keeps the eigenvalues of C and of K; TiCo's contrast does not notice either, VICReg does."""
    z = random(0, 7, 4)
    turned = z @ torch.linalg.qr(random(1, 4, 4)).Q
    assert_close(theory.shared_eigenvalues(z), theory.shared_eigenvalues(turned))
    assert differ(vicreg_loss(z, z).covariance, vicreg_loss(turned, turned).covariance)
    zero = torch.zeros(4, 4, dtype=torch.float64)
    assert_close(tico_loss(z, z, zero).contrast, tico_loss(turned, turned, zero).contrast)


# What a user can get wrong


@pytest.mark.parametrize("beta", [1.0, -0.1, math.nan])
def test_an_average_that_never_moves_is_refused(beta):
    for call in (theory.memory_length, theory.mean_age, lambda value: theory.exponential_weights(value, 3)):
        with pytest.raises(ValueError, match="beta must be in"):
            call(beta)


def test_no_embeddings_and_no_temperature_are_refused():
    with pytest.raises(ValueError, match="at least one embedding"):
        theory.most_spread(0, 3)
    with pytest.raises(ValueError, match="temperature must be positive"):
        theory.info_nce_loss(units(0, 2, 2), units(1, 2, 2), 0.0)


# The document


def test_the_documents_examples_give_what_they_say():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner()
    for number, block in enumerate(blocks):
        test = doctest.DocTestParser().get_doctest(block, names, f"example {number + 1}", str(DOCUMENT), 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    assert runner.summarize(verbose=False).attempted >= 20
    assert runner.summarize(verbose=False).failed == 0


def test_the_document_names_every_function_and_has_its_pictures():
    text = DOCUMENT.read_text(encoding="utf-8")
    functions = inspect.getmembers(theory, inspect.isfunction)
    public = [name for name, value in functions if value.__module__ == theory.__name__ and name[0] != "_"]
    assert [name for name in public if f"{name}(" not in text and f"`{name}`" not in text] == []
    pictures = re.findall(r"\]\((plots/theory-[\w-]+\.svg)\)", text)
    assert len(pictures) >= 3
    assert all((DOCUMENT.parent / picture).is_file() for picture in pictures)
