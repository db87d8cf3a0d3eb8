"""Losses against another implementation, where lightly is installed: value and gradient, at random float64 inputs.

Where the two differ by a constant, the test says it. The gradients of all are compared but TiCo's live reading, which
lightly does not have.
"""

import pytest
import torch

from tico_ssl.methods._queue import KeyQueue
from tico_ssl.methods.barlow_twins import barlow_twins_loss
from tico_ssl.methods.byol import byol_loss
from tico_ssl.methods.moco import moco_loss
from tico_ssl.methods.simclr import nt_xent_loss
from tico_ssl.methods.simsiam import simsiam_loss
from tico_ssl.methods.swav import sinkhorn, swav_loss
from tico_ssl.methods.tico import TiCoLoss
from tico_ssl.methods.vicreg import vicreg_loss

lightly = pytest.importorskip("lightly.loss")

shapes = pytest.mark.parametrize("shape", [(8, 6), (6, 8), (32, 16)])


def random(*shape, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def assert_equal(ours, theirs, inputs, factor=1.0, constant=0.0):
    """ours = factor * theirs + constant, and the gradients likewise."""
    expected = factor * theirs + constant
    torch.testing.assert_close(ours, expected.reshape(()), rtol=1e-10, atol=1e-12)
    mine = torch.autograd.grad(ours, inputs, retain_graph=True)
    other = torch.autograd.grad(expected.sum(), inputs, retain_graph=True)
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@shapes
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent(shape, temperature):
    a, b = random(*shape)
    assert_equal(nt_xent_loss(a, b, temperature).loss, lightly.NTXentLoss(temperature)(a, b), [a, b])


@shapes
def test_moco_with_its_queue_over_several_steps(shape):
    """The keys of a step are negatives from the next on. lightly's bank is as long as the queue and begins the same."""
    n, d = shape
    theirs = lightly.NTXentLoss(0.2, memory_bank_size=(3 * n, d)).double()
    queue = KeyQueue(theirs.memory_bank.bank.clone())
    for number in range(5):
        q, k = random(n, d, seed=number)
        ours = moco_loss(q, k, queue.keys.clone(), 0.2).loss
        assert_equal(ours, theirs(q, k.detach()), [q])
        queue.enqueue(torch.nn.functional.normalize(k.detach(), dim=1))
        torch.testing.assert_close(theirs.memory_bank.bank, queue.keys, rtol=1e-12, atol=0)


@shapes
def test_byol_is_twice_theirs_and_two_more(shape):
    """2 - 2 cos here, -cos there."""
    p, z = random(*shape)
    assert_equal(byol_loss(p, z), lightly.NegativeCosineSimilarity()(p, z.detach()), [p], factor=2.0, constant=2.0)


@shapes
def test_simsiam_is_half_the_sum_of_theirs_in_both_directions(shape):
    p_1, p_2, z_1, z_2 = random(*shape, count=4)
    cosine = lightly.NegativeCosineSimilarity()
    theirs = cosine(p_1, z_2.detach()) + cosine(p_2, z_1.detach())
    assert_equal(simsiam_loss(p_1, p_2, z_1, z_2), theirs, [p_1, p_2], factor=0.5)


@shapes
@pytest.mark.parametrize(("local", "earlier"), [(0, 0), (3, 0), (0, 20), (3, 20)])
def test_swav_with_local_crops_and_a_queue(shape, local, earlier):
    """Theirs also divides assignments by constants on the way, which the next sum undoes."""
    scores = [torch.tanh(one).detach().requires_grad_() for one in random(*shape, count=2 + local)]
    queues = [torch.tanh(one).detach() for one in random(earlier, shape[1], seed=1)]
    theirs = lightly.SwaVLoss()(scores[:2], scores[2:], queues if earlier else None)
    codes = [sinkhorn(score.detach(), earlier=queue) for score, queue in zip(scores, queues)]
    assert_equal(swav_loss(scores, codes), theirs, scores)


@shapes
def test_barlow_twins(shape):
    """Theirs changes its inputs in place, so it gets copies."""
    a, b = random(*shape)
    theirs = lightly.BarlowTwinsLoss(0.0051)(a.clone(), b.clone())
    assert_equal(barlow_twins_loss(a, b).loss, theirs, [a, b])


@shapes
def test_vicreg(shape):
    a, b = random(*shape)
    assert_equal(vicreg_loss(a, b).loss, lightly.VICRegLoss()(a, b), [a, b])


@shapes
def test_tico_over_several_steps(shape):
    """The gradient of the detached reading is theirs, and the value of both."""
    theirs = lightly.TiCoLoss()
    ours, live = (TiCoLoss(shape[1], detach=detach).double() for detach in (True, False))
    for number in range(4):
        a, b = random(*shape, seed=number)
        expected = theirs(a, b.detach())
        assert_equal(ours(a, b), expected, [a])
        torch.testing.assert_close(live(a, b), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours.covariance, theirs.C, rtol=1e-10, atol=1e-14)
