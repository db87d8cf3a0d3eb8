"""Supervised training, SwAV and PIRL: losses against naive loops, gradients, state, steps."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from test_distributed import Tiny
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.methods import pirl, supervised, swav
from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.runtime.errors import UserError

N = 8


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape, seed=0):
    return nn.functional.normalize(random(*shape, seed=seed), dim=-1)


# ---------------------------------------------------------------------------------------------------- naive oracles


def naive_log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(value - top) for value in row)) + top
    return [value - total for value in row]


def naive_supervised(logits, labels):
    return -sum(naive_log_softmax(row)[label] for row, label in zip(logits.tolist(), labels.tolist())) / len(logits)


def naive_sinkhorn(scores, epsilon, iterations):
    """As the paper's code writes it: prototypes by images, with all its constants."""
    n, K = scores.shape
    Q = [[math.exp(float(scores[i, k]) / epsilon) for i in range(n)] for k in range(K)]
    whole = sum(map(sum, Q))
    Q = [[value / whole for value in row] for row in Q]
    for _ in range(iterations):
        Q = [[value / sum(row) / K for value in row] for row in Q]
        columns = [sum(Q[k][i] for k in range(K)) for i in range(n)]
        Q = [[Q[k][i] / columns[i] / n for i in range(n)] for k in range(K)]
    return torch.tensor([[Q[k][i] * n for k in range(K)] for i in range(n)], dtype=torch.float64)


def naive_swav(scores, assignments, temperature):
    outer = 0.0
    for a, q in enumerate(assignments):
        inner = 0.0
        for v, s in enumerate(scores):
            if v == a:
                continue
            for i in range(len(s)):
                logs = naive_log_softmax([float(x) / temperature for x in s[i]])
                inner -= sum(float(q[i, k]) * logs[k] for k in range(len(logs))) / len(s)
        outer += inner / (len(scores) - 1)
    return outer / len(assignments)


def naive_pirl(embedding, own, negatives, left_out, temperature, loss="softmax", constant=None):
    total, drawn = 0.0, len(negatives)
    for i, raw in enumerate(embedding.tolist()):
        length = math.sqrt(sum(x * x for x in raw))
        a = [x / length for x in raw]
        kept = [negatives[j].tolist() for j in range(drawn) if not left_out[i, j]]
        powers = [math.exp(sum(x * y for x, y in zip(a, memory)) / temperature) for memory in [own[i].tolist(), *kept]]
        if loss == "nce":  # VISSL: the model's probability of an entry against that of k uniform draws from N images
            N = 1000
            model = [power / (N * constant) for power in powers]
            h = [p / (p + drawn / N) for p in model]
        else:
            h = [power / sum(powers) for power in powers]
        total -= math.log(h[0])
        if loss != "cross-entropy":
            total -= sum(math.log(1 - share) for share in h[1:])
    return total / len(embedding)


# ---------------------------------------------------------------------------------------------------- losses


def test_supervised_loss_is_the_naive_one():
    logits, labels = random(N, 5), torch.arange(N) % 5
    loss = supervised.supervised_loss(logits, labels)
    assert float(loss) == pytest.approx(naive_supervised(logits, labels), rel=1e-12)
    assert float(supervised.supervised_loss(logits, labels.double())) == float(loss)


def test_supervised_loss_of_no_knowledge_and_of_certainty():
    labels = torch.arange(4)
    assert float(supervised.supervised_loss(torch.zeros(4, 10), labels)) == pytest.approx(math.log(10), rel=1e-6)
    assert float(supervised.supervised_loss(100 * torch.eye(4), labels)) == pytest.approx(0, abs=1e-6)


def test_sinkhorn_is_the_naive_one():
    scores = unit(N, 6) @ unit(5, 6, seed=1).T
    torch.testing.assert_close(swav.sinkhorn(scores, 0.05, 3), naive_sinkhorn(scores, 0.05, 3), rtol=1e-10, atol=1e-14)


def test_sinkhorn_marginals():
    scores = unit(30, 6) @ unit(5, 6, seed=1).T
    few, many = (swav.sinkhorn(scores, 0.2, iterations) for iterations in (3, 500))
    for Q in (few, many):
        torch.testing.assert_close(Q.sum(dim=1), torch.ones(30, dtype=torch.float64))
    torch.testing.assert_close(many.sum(dim=0), torch.full((5,), 6.0, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (few.sum(dim=0) - 6).abs().max() < 3


def test_sinkhorn_of_one_point_is_uniform_and_of_clusters_is_sharp():
    same = swav.sinkhorn(random(1, 5).expand(N, 5) / 10)
    torch.testing.assert_close(same, torch.full((N, 5), 0.2, dtype=torch.float64))
    torch.testing.assert_close(swav.sinkhorn(torch.eye(4)), torch.eye(4), rtol=0, atol=1e-6)


def test_sinkhorn_with_earlier_images_is_that_of_both_or_of_none():
    scores, earlier = unit(N, 6) @ unit(5, 6, seed=1).T, unit(12, 6, seed=2) @ unit(5, 6, seed=1).T
    both = naive_sinkhorn(torch.cat([scores, earlier]), 0.05, 3)[:N]
    torch.testing.assert_close(swav.sinkhorn(scores, earlier=earlier), both, rtol=1e-10, atol=1e-14)
    assert torch.equal(swav.sinkhorn(scores, earlier=earlier, weight=0.0), swav.sinkhorn(scores))


def test_sinkhorn_stands_the_extremes_in_float32():
    scores = torch.tensor([[1.0, -1.0], [1.0, -1.0], [1.0, -1.0]])
    assert swav.sinkhorn(scores, 0.025).isfinite().all()


@pytest.mark.parametrize("views", [2, 4])
def test_swav_loss_is_the_naive_one(views):
    scores = [unit(N, 6, seed=v) @ unit(5, 6, seed=9).T for v in range(views)]
    codes = [naive_sinkhorn(score, 0.05, 3) for score in scores[:2]]
    assert float(swav.swav_loss(scores, codes, 0.1)) == pytest.approx(naive_swav(scores, codes, 0.1), rel=1e-12)


def test_swav_assignments_take_no_gradient():
    scores = [random(N, 5, seed=v).requires_grad_() for v in range(3)]
    codes = [torch.full((N, 5), 0.2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    swav.swav_loss(scores, codes).backward()
    assert all(score.grad.abs().sum() > 0 for score in scores)
    assert all(code.grad is None for code in codes)
    assert not swav.sinkhorn(scores[0]).requires_grad


def test_swav_loss_of_equal_scores():
    loss = swav.swav_loss([torch.zeros(N, 7)] * 2, [torch.full((N, 7), 1 / 7)] * 2)
    assert float(loss) == pytest.approx(math.log(7), rel=1e-6)


PIRL_LOSSES = {
    "nce": lambda scores: pirl.nce_loss(scores, 2.5),
    "softmax": pirl.softmax_loss,
    "cross-entropy": pirl.cross_entropy_loss,
}
every_pirl_loss = pytest.mark.parametrize("kind", PIRL_LOSSES)


@every_pirl_loss
def test_pirl_loss_is_the_naive_one(kind):
    embedding, own, negatives = random(N, 6), unit(N, 6, seed=1), unit(20, 6, seed=2)
    left_out = random(N, 20, seed=3) > 1
    loss = PIRL_LOSSES[kind](pirl.similarities(embedding, own, negatives, left_out, 0.2))
    expected = naive_pirl(embedding, own, negatives, left_out, 0.2, kind, 2.5)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_pirl_loss_of_one_point():
    one = torch.ones(N, 4, dtype=torch.float64)
    memory = one / 2
    scores = pirl.similarities(one, memory, memory[:1].expand(50, 4))
    assert float(pirl.softmax_loss(scores)) == pytest.approx(math.log(51) - 50 * math.log(50 / 51), rel=1e-9)
    assert float(pirl.cross_entropy_loss(scores)) == pytest.approx(math.log(51), rel=1e-9)
    # With the constant of these very scores every entry is the image's own with probability 1 / 51, as by chance.
    loss = pirl.nce_loss(scores, scores.exp().mean())
    assert float(loss) == pytest.approx(math.log(51) - 50 * math.log(50 / 51), rel=1e-9)


@every_pirl_loss
def test_pirl_gradient_goes_to_the_embedding_alone_and_is_finite(kind):
    embedding = random(N, 6).requires_grad_()
    own, negatives = unit(N, 6, seed=1).requires_grad_(), unit(20, 6, seed=2).requires_grad_()
    left_out = torch.arange(20).expand(N, 20) < 4
    PIRL_LOSSES[kind](pirl.similarities(embedding, own, negatives, left_out, 0.01)).backward()
    assert embedding.grad.isfinite().all()
    assert embedding.grad.abs().sum() > 0
    assert own.grad is None
    assert negatives.grad is None
    loss = lambda x: PIRL_LOSSES[kind](pirl.similarities(x, own.detach(), negatives.detach(), left_out, 0.5))  # noqa: E731
    assert torch.autograd.gradcheck(loss, (embedding,))


@every_pirl_loss
def test_pirl_loss_of_the_worst_negative_is_finite(kind):
    one = torch.eye(4)
    embedding = one[:1].clone().requires_grad_()
    loss = PIRL_LOSSES[kind](pirl.similarities(embedding, -one[:1], one[:1], temperature=0.01))
    loss.backward()
    assert loss.isfinite()
    assert embedding.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_losses_are_float32_at_least(dtype):
    scores = random(N, 5).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert supervised.supervised_loss(scores, torch.arange(N) % 5).dtype == torch.float32
        assert swav.sinkhorn(scores / 10).dtype == torch.float32
        assert swav.swav_loss([scores, scores], [scores, scores]).dtype == torch.float32
        assert {loss(pirl.similarities(scores, scores, scores)).dtype for loss in PIRL_LOSSES.values()} == {
            torch.float32
        }


@pytest.mark.parametrize(
    "call",
    [
        lambda: supervised.supervised_loss(torch.zeros(3, 2), torch.zeros(2)),
        lambda: swav.swav_loss([torch.zeros(3, 2)], [torch.zeros(3, 2)]),
        lambda: swav.swav_loss([torch.zeros(3, 2)] * 2, [torch.zeros(3, 4)]),
        lambda: pirl.similarities(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(9, 4)),
    ],
)
def test_shapes_that_do_not_fit(call):
    with pytest.raises(ValueError, match=r"must|do not fit"):
        call()


# ---------------------------------------------------------------------------------------------------- methods


SETTINGS = {
    "supervised": (supervised, supervised.Config(classes=4)),
    "swav": (swav, swav.Config(hidden=16, dim=8, prototypes=6, freeze_steps=0)),
    "swav-queue": (swav, swav.Config(hidden=16, dim=8, prototypes=6, freeze_steps=1, queue=2 * N)),
    "pirl": (pirl, pirl.Config(images=40, dim=8, negatives=32)),
    "pirl-softmax": (pirl, pirl.Config(images=40, dim=8, negatives=32, loss="softmax")),
}


def built(name, dtype=torch.float64):
    torch.manual_seed(0)
    module, config = SETTINGS[name]
    return module.build(config, build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)).to(dtype).train()


def batch_for(name, n=N, dtype=torch.float64):
    if name.startswith("pirl"):
        views = (random(n, 3, 16, 16, dtype=dtype), random(n, 9, 3, 8, 8, seed=1, dtype=dtype))
    elif name == "supervised":
        views = (random(n, 3, 16, 16, dtype=dtype),)
    else:
        views = tuple(random(n, 3, size, size, seed=size + v, dtype=dtype) for v, size in enumerate((16, 16, 8)))
    return Batch(views, torch.arange(n) * 3, torch.arange(n) % 4)


def trained(method, batch, steps, lr=0.05):
    optimizer = torch.optim.SGD(method.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        torch.manual_seed(5)
        output = method(batch)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        assert all(isinstance(float(value), float) for value in method.after_step(step / steps).values())
        losses.append(float(output.loss.detach()))
    return losses


@pytest.mark.parametrize("name", SETTINGS)
def test_a_method_keeps_the_contract(name):
    method = built(name)
    assert isinstance(method, Method)
    assert method.collapsed_loss() is None
    output = method(batch_for(name))
    assert output.loss.ndim == 0
    assert output.loss.requires_grad
    assert output.embedding is not None
    assert not output.embedding.requires_grad
    assert len(output.embedding) == N
    assert not any(term.requires_grad for term in output.terms.values())
    assert all(value.ndim == 0 for value in method.diagnostics().values())


@pytest.mark.parametrize("name", SETTINGS)
def test_training_lowers_the_loss(name):
    """By one step, if nothing else moves; and by many."""
    method, batch = built(name), batch_for(name)
    twin = copy.deepcopy(method)
    torch.manual_seed(5)
    before = twin(batch).loss
    before.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
    torch.manual_seed(5)
    assert twin(batch).loss.item() < before.item()
    if not name.startswith("pirl"):  # whose target moves with it at first
        losses = trained(method, batch, 30)
        assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_takes_a_gradient(name):
    method = built(name)
    trained(method, batch_for(name), 2)  # thaws the prototypes; zero_gamma hides the branches of blocks before
    method(batch_for(name)).loss.backward()
    for key, parameter in method.named_parameters():
        assert parameter.grad is not None, key
        if key != "projector.3.bias":
            assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", SETTINGS)
def test_the_state_is_complete(name):
    method, batch = built(name), batch_for(name)
    trained(method, batch, 3)
    other = built(name)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(method.state_dict())
    assert trained(method, batch, 3) == trained(other, batch, 3)
    for key, value in method.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.parametrize("name", SETTINGS)
def test_encoding_in_parts_is_encoding_at_once(name):
    method, batch = built(name).eval(), batch_for(name)
    halves = [
        Batch(tuple(view[part] for view in batch.views), batch.index[part], batch.label[part])
        for part in (slice(0, N // 2), slice(N // 2, N))
    ]
    encoded = [method.encode(half) for half in halves]
    trained_parts = tuple(torch.cat(parts) for parts in zip(*(one.trained for one in encoded)))
    fixed_parts = tuple(torch.cat(parts) for parts in zip(*(one.fixed for one in encoded)))
    assert not any(one.requires_grad for one in fixed_parts)
    assert method.encode(halves[0], fixed=False).fixed == ()
    torch.manual_seed(5)
    in_parts = method.loss(Encoded(trained_parts, fixed_parts)).loss
    torch.manual_seed(5)
    torch.testing.assert_close(in_parts, method(batch).loss)
    leaves = tuple(one.detach().requires_grad_() for one in trained_parts)
    method.loss(Encoded(leaves, fixed_parts)).loss.backward()
    assert all(parameter.grad is None for parameter in method.parameters())  # all of them work in encode


def test_supervised_needs_labels():
    method, batch = built("supervised"), batch_for("supervised")
    with pytest.raises(UserError, match="needs labels"):
        method(Batch(batch.views, batch.index))
    with pytest.raises(UserError, match="one label per image"):
        method(Batch(batch.views, batch.index, torch.zeros(N, 4)))


def test_supervised_looks_at_all_labels_before_it_begins():
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)
    method = supervised.build(supervised.Config(classes=4), backbone)
    method.check_data(N, torch.arange(N) % 4)
    for labels, message in (
        (None, "needs labels"),
        (torch.zeros(N, 4), "one label per image"),
        (torch.arange(5), r"labels range from 0 to 4, but method\.classes 4 allows 0 to 3"),
        (torch.tensor([-1, 3]), "labels range from -1 to 3"),
    ):
        with pytest.raises(UserError, match=message):
            method.check_data(N, labels)


def test_supervised_counts_what_is_right():
    logits = torch.eye(4)
    output = built("supervised").loss(Encoded((logits,), (torch.tensor([0, 1, 2, 0]),)))
    assert float(output.terms["accuracy"]) == 0.75


def test_swav_is_the_naive_loss_of_its_networks():
    method, batch = built("swav").eval(), batch_for("swav")
    z = [nn.functional.normalize(method.projector(method.backbone(view)), dim=1) for view in batch.views]
    scores = [(one @ method.prototypes.T).detach() for one in z]
    codes = [naive_sinkhorn(score, 0.05, 3) for score in scores[:2]]
    assert float(method(batch).loss.detach()) == pytest.approx(naive_swav(scores, codes, 0.1), rel=1e-9)


def moved_statistics(*batches):
    """BatchNorm's running mean and variance after these inputs (n, channels, ...), from zero and one."""
    mean, variance = 0.0, 1.0
    for given in batches:
        rows = given.movedim(1, -1).flatten(0, -2)
        mean = 0.9 * mean + 0.1 * rows.mean(dim=0)
        variance = 0.9 * variance + 0.1 * rows.var(dim=0)
    return mean, variance


@pytest.mark.parametrize("joint", [True, False])
def test_swav_statistics_are_those_of_a_size_in_the_backbone_and_of_all_crops_in_the_projector(joint):
    """Or, one pass per crop, those of one crop after the other."""
    config = swav.Config(hidden=16, dim=8, prototypes=6, joint_pass=joint)
    torch.manual_seed(0)
    method, views = swav.build(config, Tiny()).double().train(), batch_for("swav").views
    first, norm = method.backbone.layers[:2]
    passes = [torch.cat(views[:2]), views[2]] if joint else views
    seen = [first(images).detach() for images in passes]
    features = [copy.deepcopy(method.backbone)(images) for images in passes]
    hidden = [method.projector[0](one).detach() for one in features]
    method.encode(Batch(views, torch.arange(N)))
    for layer, given in ((norm, seen), (method.projector[1], [torch.cat(hidden)] if joint else hidden)):
        mean, variance = moved_statistics(*given)
        torch.testing.assert_close(layer.running_mean, mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.running_var, variance, rtol=1e-10, atol=1e-12)
        assert int(layer.num_batches_tracked) == len(given)


def test_swav_freezes_prototypes_then_moves_them_on_the_sphere():
    method, batch = built("swav-queue"), batch_for("swav")
    before = method.prototypes.detach().clone()
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        method(batch).loss.backward()
        assert (method.prototypes.grad.abs().sum() == 0) == (step == 0)
        optimizer.step()
        method.after_step(0.0)
        torch.testing.assert_close(method.prototypes.norm(dim=1), torch.ones(6, dtype=torch.float64))
        moved = float((method.prototypes.detach() - before).abs().max())
        assert (moved < 1e-6) == (step == 0)  # they were made in float32


def test_swav_queue_holds_the_newest_and_counts_when_full_and_due():
    method, batch = built("swav-queue"), batch_for("swav")
    encoded = method.encode(batch)
    plain = swav.sinkhorn(encoded.trained[0])
    for _ in range(2):
        assert torch.equal(method._assigned(0, encoded.trained[0].detach()), plain)
        method.loss(encoded)
    for view in (0, 1):
        assert torch.equal(method.queue[view], encoded.fixed[view].repeat(2, 1))
    earlier = encoded.trained[0].detach().repeat(2, 1)
    mine = method._assigned(0, encoded.trained[0].detach())
    torch.testing.assert_close(mine, naive_sinkhorn(torch.cat([earlier[:N], earlier]), 0.05, 3)[:N])
    method.config = method.config.model_copy(update={"queue_start": 1})
    assert torch.equal(method._assigned(0, encoded.trained[0].detach()), plain)
    method.after_step(0.5)
    frozen = method._assigned(0, method.encode(batch).trained[0].detach())
    assert frozen.isfinite().all()
    method.eval()
    queue = method.queue.clone()
    method(batch)
    assert torch.equal(method.queue, queue)


def test_swav_queue_that_lags_behind_assigns_a_batch_to_where_it_is_going():
    """Sinkhorn takes out what all images have in common, unless a queue of earlier embeddings did not have it."""
    prototypes, embeddings = (nn.functional.normalize(random(n, 16, seed=n), dim=1) for n in (200, 64))
    drift = nn.functional.normalize(random(16, seed=3), dim=0)
    moved = nn.functional.normalize(embeddings + 0.5 * drift, dim=1)
    alone = swav.sinkhorn(moved @ prototypes.T)
    lagging = swav.sinkhorn(moved @ prototypes.T, earlier=embeddings.repeat(15, 1) @ prototypes.T)
    ahead = [float((codes.mean(dim=0) - 1 / 200) @ prototypes @ drift) for codes in (alone, lagging)]
    assert abs(ahead[0]) < 0.03 < 0.2 < ahead[1]


@pytest.mark.parametrize(("epsilon", "temperature"), [(0.05, 0.1), (0.03, 0.1), (0.03, 0.2)])
@pytest.mark.parametrize("above", [False, True])
def test_swav_scores_grow_where_views_correlate_by_more_than_epsilon_over_temperature(epsilon, temperature, above):
    """Of small scores that two views share in part: larger ones would have a smaller loss above the ratio alone."""
    correlation = epsilon / temperature + (0.05 if above else -0.05)
    first, other = random(1000, 300, seed=1), random(1000, 300, seed=2)
    second = correlation * first + math.sqrt(1 - correlation**2) * other
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    scores = [0.001 * view for view in (first, second)]
    assignments = [swav.sinkhorn(score, epsilon) for score in scores]
    swav.swav_loss([scale * score for score in scores], assignments, temperature).backward()
    assert (float(scale.grad) < 0) == above


def test_swav_correlation_of_views_is_that_of_centred_scores():
    views = [random(N, 7, seed=seed) + 3 * random(7, seed=9) for seed in range(3)]
    views[2] = views[2] + 2 * views[0]
    flat = [(view - view.mean(dim=0)).flatten().numpy() for view in views]
    expected = np.mean([np.corrcoef(flat[0], other)[0, 1] for other in flat[1:]])
    assert float(swav.view_correlation(views)) == pytest.approx(expected, abs=1e-12)
    assert float(swav.view_correlation([views[0], 5 * views[0] + 1])) == pytest.approx(1, abs=1e-12)
    assert float(swav.view_correlation([torch.ones(4, 3)] * 2)) == 0


def test_swav_counts_the_prototypes_that_are_nearest():
    """exp(entropy) of their shares: one if one takes all images, all if they share them, and between by formula."""
    method = built("swav")
    nearest = lambda *places: nn.functional.one_hot(torch.tensor(places), 6).double()  # noqa: E731
    assert float(method._used(nearest(2, 2, 2, 2))) == pytest.approx(1, abs=1e-12)
    assert float(method._used(nearest(0, 1, 2, 3, 4, 5))) == pytest.approx(6, abs=1e-12)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(method._used(nearest(0, 0, 0, 5))) == pytest.approx(math.exp(entropy), abs=1e-12)
    assert method(batch_for("swav")).terms["prototypes_used"] <= 6


def test_swav_tells_whether_prototypes_have_become_one():
    method = built("swav-queue")
    rows = method.prototypes.detach()
    pairs = [float(a @ b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    found = method.diagnostics()
    assert float(found["prototype_cosine"]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)  # made in float32
    assert float(found["queue_filled"]) == 0
    method(batch_for("swav"))
    assert float(method.diagnostics()["queue_filled"]) == 0.5
    with torch.no_grad():
        method.prototypes.copy_(method.prototypes[:1].expand(6, 8))
    assert float(method.diagnostics()["prototype_cosine"]) == pytest.approx(1, abs=1e-6)


def test_swav_queue_shorter_than_a_batch_is_one_line():
    with pytest.raises(UserError, match=r"method\.queue 16 is shorter than a batch of 17"):
        built("swav-queue")(batch_for("swav", n=17))


def test_pirl_memory_follows_the_images_of_a_step():
    method, batch = built("pirl"), batch_for("pirl")
    before = method.bank.clone()
    torch.testing.assert_close(before.norm(dim=1), torch.ones(40, dtype=torch.float64))
    output = method(batch)
    assert torch.equal(method.bank, before)
    method.after_step(0.0)
    expected = before.clone()
    for row, place in enumerate(batch.index.tolist()):
        new = 0.5 * before[place] + 0.5 * output.embedding[row] / output.embedding[row].norm()
        expected[place] = new / new.norm()
    torch.testing.assert_close(method.bank, expected)
    method.after_step(0.1)
    torch.testing.assert_close(method.bank, expected)  # once
    method.eval()
    method(batch)
    method.after_step(0.1)
    torch.testing.assert_close(method.bank, expected)


def test_pirl_tells_which_memories_were_written_and_whether_they_are_alike():
    method, batch = built("pirl"), batch_for("pirl")
    assert [float(value) for value in method.diagnostics().values()] == [0, 0]
    method(batch)
    method.after_step(0.0)
    found = method.diagnostics()
    assert float(found["memory_visited"]) == pytest.approx(N / 40)
    written = method.bank[batch.index]
    pairs = [float(a @ b) for i, a in enumerate(written) for j, b in enumerate(written) if i != j]
    assert float(found["memory_cosine"]) == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)


@pytest.mark.parametrize("name", ["pirl", "pirl-softmax"])
def test_pirl_is_the_naive_loss_of_its_networks(name):
    method, batch = built(name).eval(), batch_for("pirl")
    torch.manual_seed(5)
    loss = float(method(batch).loss.detach())
    torch.manual_seed(5)
    drawn = torch.randint(40, (32,))
    image, jigsaw = (one.detach() for one in method.encode(batch).trained)
    pieces = torch.stack([method.piece_head(method.backbone(batch.views[1][:, piece])) for piece in range(9)], dim=1)
    torch.testing.assert_close(jigsaw, method.jigsaw_head(pieces.reshape(N, -1)))
    left_out = batch.index[:, None] == drawn[None]
    assert left_out.any()
    given = method.bank[batch.index], method.bank[drawn], left_out, 0.07
    constant = float(pirl.similarities(jigsaw, *given).exp().mean())
    parts = [naive_pirl(embedding, *given, method.config.loss, constant) for embedding in (image, jigsaw)]
    assert loss == pytest.approx(sum(parts) / 2, rel=1e-9)


def test_pirl_takes_its_constant_from_the_first_step():
    """Of the jigsaws' scores, as in VISSL; evaluation before it uses one of its own and keeps none."""
    method, batch = built("pirl"), batch_for("pirl")
    method.eval()(batch)
    assert float(method.constant) == 0
    method.train()
    torch.manual_seed(5)
    drawn = torch.randint(40, (32,))
    left_out = batch.index[:, None] == drawn[None]
    with torch.no_grad():
        jigsaw = copy.deepcopy(method).encode(batch).trained[1]
        scores = pirl.similarities(jigsaw, method.bank[batch.index], method.bank[drawn], left_out)
    trained(method, batch, 1)
    first = float(method.constant)
    assert first == pytest.approx(float(scores.exp().mean()), rel=1e-9)
    trained(method, batch, 2)
    assert float(method.constant) == first


def test_pirl_says_what_does_not_fit():
    method, batch = built("pirl"), batch_for("pirl")
    method.check_data(40, None)
    with pytest.raises(UserError, match=r"has 40 entries for 41 images: set method\.images=41"):
        method.check_data(41, None)
    with pytest.raises(UserError, match="jigsaw of 9 pieces"):
        method(Batch((batch.views[0], batch.views[0]), batch.index))
    with pytest.raises(UserError, match="jigsaw of 9 pieces"):
        method(Batch((batch.views[0], batch.views[1][:, :4]), batch.index))


# ---------------------------------------------------------------------------------------------------- recipes


def test_the_papers_values():
    recipe = load_recipe("imagenet/swav")
    assert sum(view.count for view in recipe.views) == 8
    assert (recipe.optimizer.lr, recipe.training.batch_size, recipe.training.epochs) == (0.3, 4096, 800)
    assert (recipe.method.prototypes, recipe.method.freeze_steps, recipe.method.queue) == (3000, 313, 0)
    recipe = load_recipe("imagenet/pirl")
    assert (recipe.optimizer.lr, recipe.training.batch_size, recipe.training.epochs) == (0.03, 1024, 800)
    assert (recipe.method.negatives, recipe.method.temperature, recipe.method.weight) == (32_000, 0.07, 0.5)
    assert (recipe.method.loss, recipe.method.decay, recipe.method.dim) == ("nce", 0.5, 128)
    assert recipe.views[1].jigsaw ** 2 == recipe.method.pieces
    for name in ("cifar10/swav", "cifar10/swav-multicrop"):  # solo-learn: one pass per crop, freezing for two epochs
        method = load_recipe(name).method
        assert (method.joint_pass, method.freeze_steps, method.temperature) == (False, 2 * (50_000 // 256), 0.1)
        assert (method.hidden, method.dim, method.prototypes, method.iterations) == (2048, 128, 3000, 3)
    recipe = load_recipe("cifar10/swav-multicrop")
    assert [view.side(32) for view in recipe.views for _ in range(view.count)] == [32, 32, *[18] * 6]
    assert (recipe.method.epsilon, recipe.optimizer.lr, recipe.optimizer.end_lr_ratio) == (0.05, 0.6, 0.0006 / 0.6)
    recipe = load_recipe("cifar10/swav")
    assert (recipe.optimizer.lr, recipe.method.queue, recipe.method.queue_start) == (0.6, 3840, 50 * (50_000 // 256))
    assert [load_recipe(f"{data}/supervised").method.classes for data in ("imagenet", "cifar10")] == [1000, 10]
