"""MoCo, BYOL and the squared contrastive loss: methods whose keys come from a slowly moving target.

Losses are compared with sums written out number by number in float64; networks are a few numbers wide.
"""

import io
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from test_distributed import Tiny, in_two_processes, one_step
from tico_ssl import pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.methods import byol, moco, squared_contrastive
from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.methods._queue import KeyQueue
from tico_ssl.methods.byol import byol_loss
from tico_ssl.methods.moco import moco_loss
from tico_ssl.methods.squared_contrastive import squared_contrastive_loss
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.runtime.errors import UserError

TIGHT = 1e-12
N, D, IMAGES = 6, 5, 8

FORMS = {
    "moco v1": (moco, {"head": "linear", "dim": 5, "temperature": 0.07, "queue": 32, "ema_start": 0.9, "ema_end": 0.9}),
    "moco v2": (moco, {"hidden": 7, "dim": 5, "queue": 16}),
    "moco symmetric": (moco, {"hidden": 7, "dim": 5, "queue": 32, "symmetric": True, "ema_start": 0.9}),
    "moco queues": (moco, {"hidden": 7, "dim": 5, "queue": 16, "symmetric": True, "queue_per_view": True}),
    "moco splits": (moco, {"hidden": 7, "dim": 5, "queue": 16, "ema_start": 0.9, "bn_splits": 2}),
    "byol": (byol, {"hidden": 7, "dim": 5, "ema_start": 0.9}),
    "in batch": (squared_contrastive, {"hidden": 7, "dim": 5, "ema_start": 0.9}),
    "bank": (squared_contrastive, {"hidden": 7, "dim": 5, "bank": 16, "ema_start": 0.9}),
}
every_form = pytest.mark.parametrize("form", FORMS)


def make(form: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module, values = FORMS[form]
    return module.build(module.Config(**values), Tiny()).double().train()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([row / math.sqrt(sum(float(x) ** 2 for x in row)) for row in rows])


def batch(seed: int = 0, count: int = IMAGES) -> Batch:
    return Batch(
        (random(count, 3, 8, 8, seed=2 * seed), random(count, 3, 8, 8, seed=2 * seed + 1)), torch.arange(count)
    )


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def moved(model: nn.Module, number: int, lr: float = 0.3) -> torch.Tensor:
    """One step of plain gradient descent."""
    output = model(batch(number))
    model.zero_grad()
    output.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    model.after_step(0.3)
    return output.loss.detach()


# ---------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("temperature", [0.07, 0.2, 1.0])
def test_moco_is_the_sum_written_out(temperature):
    query, key, queue = random(N, D), random(N, D, seed=1), unit(random(9, D, seed=2))
    q, k = unit(query), unit(key)
    total = 0.0
    for i in range(N):
        own = math.exp(dot(q[i], k[i]) / temperature)
        total -= math.log(own / (own + sum(math.exp(dot(q[i], queue[j]) / temperature) for j in range(9)))) / N
    terms = moco_loss(query, key, queue, temperature)
    assert float(terms.loss) == pytest.approx(total, abs=TIGHT)
    assert float(terms.alignment + terms.contrast) == pytest.approx(total, abs=TIGHT)


def test_byol_is_the_sum_written_out():
    prediction, target = random(N, D), random(N, D, seed=1)
    p, z = unit(prediction), unit(target)
    expected = sum(sum((float(p[i, c]) - float(z[i, c])) ** 2 for c in range(D)) for i in range(N)) / N
    assert float(byol_loss(prediction, target)) == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize("rho", [0.0, 1.0, 8.0])
def test_squared_contrast_in_a_batch_is_the_sum_written_out(rho):
    online, target = random(N, D), random(N, D, seed=1)
    z_1, z_2 = unit(online), unit(target)
    expected = -sum(dot(z_1[i], z_2[i]) for i in range(N)) / N
    expected += rho / N**2 * sum(dot(z_1[i], z_2[j]) ** 2 for i in range(N) for j in range(N) if j != i)
    assert float(squared_contrastive_loss(online, target, rho=rho).loss) == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize("rho", [0.0, 1.0, 8.0])
def test_squared_contrast_with_a_bank_is_the_sum_written_out_and_a_quadratic_form(rho):
    online, target = random(N, D), random(N, D, seed=1)
    z_1, z_2 = unit(online), unit(target)
    bank = torch.cat([z_2, unit(random(12, D, seed=2))])
    m = len(bank)
    contrast = rho / (N * m) * sum(dot(z_1[i], bank[j]) ** 2 for i in range(N) for j in range(m))
    expected = -sum(dot(z_1[i], z_2[i]) for i in range(N)) / N + contrast
    terms = squared_contrastive_loss(online, target, bank, rho, leave_out_own=False)
    assert float(terms.loss) == pytest.approx(expected, abs=TIGHT)
    # The identity: rho times the mean of z' C z', C the second moment of the bank.
    C = [[sum(float(key[a]) * float(key[b]) for key in bank) / m for b in range(D)] for a in range(D)]
    form = sum(float(z[a]) * C[a][b] * float(z[b]) for z in z_1 for a in range(D) for b in range(D)) / N
    assert float(terms.contrast) == pytest.approx(rho * form, abs=TIGHT)
    assert contrast == pytest.approx(rho * form, abs=TIGHT)


def test_known_cases():
    same, axes = torch.ones(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert float(moco_loss(same, same, same / 2, 0.5).loss) == pytest.approx(math.log(5))
    assert float(moco_loss(axes, axes, -axes[:1] * 0, 1.0).loss) == pytest.approx(math.log(1 + math.exp(-1)))
    assert float(byol_loss(axes, 3 * axes)) == pytest.approx(0)
    assert float(byol_loss(axes, -axes)) == pytest.approx(4)
    assert float(byol_loss(axes, axes.roll(1, 0))) == pytest.approx(2)
    assert float(squared_contrastive_loss(axes, axes).loss) == pytest.approx(-1)
    assert float(squared_contrastive_loss(same, same, rho=8.0).loss) == pytest.approx(-1 + 8 * 3 / 4)
    in_bank = squared_contrastive_loss(same, same, same / 2, 8.0, leave_out_own=False)
    assert float(in_bank.loss) == pytest.approx(make("bank").collapsed_loss()) == pytest.approx(7)
    assert make("byol").collapsed_loss() == 0
    assert make("moco v2").collapsed_loss() is None


LOSSES = {
    "moco": lambda x, y, keys: moco_loss(x, y, keys).loss,
    "byol": lambda x, y, keys: byol_loss(x, y),
    "in batch": lambda x, y, keys: squared_contrastive_loss(x, y).loss,
    "bank": lambda x, y, keys: squared_contrastive_loss(x, y, keys, leave_out_own=False).loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_first_argument_alone(name):
    online, target, keys = random(N, D).requires_grad_(), random(N, D, seed=1), unit(random(9, D, seed=2))
    LOSSES[name](online, target.requires_grad_(), keys.requires_grad_()).backward()
    assert target.grad is None
    assert keys.grad is None
    assert online.grad.abs().max() > 0
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, target.detach(), keys.detach()), (online,))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_in_float32_at_least(name):
    online, target, keys = random(N, D).bfloat16(), random(N, D, seed=1).bfloat16(), unit(random(9, D, seed=2))
    expected = LOSSES[name](online.double(), target.double(), keys)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = LOSSES[name](online, target, keys.float())
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_shapes_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=r"must both be \(batch, dim\)"):
        LOSSES[name](random(N, D), random(N, D + 1), random(9, D))
    if name in ("moco", "bank"):
        with pytest.raises(ValueError, match="5 dimensions"):
            LOSSES[name](random(N, D), random(N, D), random(9, D + 1))


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="temperature"):
        moco_loss(random(N, D), random(N, D), random(9, D), 0.0)
    with pytest.raises(ValueError, match="rho"):
        squared_contrastive_loss(random(N, D), random(N, D), rho=-1.0)


# ---------------------------------------------------------------------------------------------------- the queue


def test_a_queue_writes_newest_over_oldest_and_wraps_around():
    queue = KeyQueue(torch.zeros(6, 1))
    held = [0.0] * 6
    for step in range(7):
        new = torch.tensor([[10.0 * step + 1], [10.0 * step + 2]])
        preview = queue.with_keys(new)
        assert queue.keys.flatten().tolist() == held
        for offset in (0, 1):
            held[(2 * step + offset) % 6] = float(new[offset])
        queue.enqueue(new)
        assert queue.keys.flatten().tolist() == preview.flatten().tolist() == held
        assert int(queue.written) == 2 * step + 2
        assert float(queue.filled()) == pytest.approx(min(1, (step + 1) / 3))
    with pytest.raises(UserError, match="6 keys is not a multiple of the 4"):
        queue.enqueue(torch.zeros(4, 1))


def test_moco_contrasts_with_the_keys_of_the_steps_before():
    model = make("moco v2")
    encoded = [Encoded((random(IMAGES, 5, seed=s),), (random(IMAGES, 5, seed=9 + s),)) for s in range(4)]
    queue = model.queue.keys.clone()
    for step, given in enumerate(encoded):
        expected = moco_loss(given.trained[0], given.fixed[0], queue, 0.2).loss
        assert model.loss(given).loss.item() == pytest.approx(expected.item(), abs=TIGHT)
        start = step * IMAGES % 16
        queue[start : start + IMAGES] = unit(given.fixed[0])
        torch.testing.assert_close(model.queue.keys, queue, rtol=0, atol=TIGHT)
        assert float(model.diagnostics()["queue_filled"]) == min(1, (step + 1) / 2)


def test_symmetric_moco_is_the_mean_of_both_directions_and_keeps_both_keys():
    model = make("moco symmetric")
    queue = model.queue.keys.clone()
    encoded = model.encode(batch())
    (q_1, q_2), (k_2, k_1) = encoded.trained, encoded.fixed
    view_1, view_2 = batch().views
    torch.testing.assert_close(q_2, model.embed(view_2))
    torch.testing.assert_close(k_1, model.target(view_1))
    expected = (moco_loss(q_1, k_2, queue).loss + moco_loss(q_2, k_1, queue).loss) / 2
    assert model.loss(encoded).loss.item() == pytest.approx(expected.item(), abs=TIGHT)
    torch.testing.assert_close(model.queue.keys[:16], torch.cat([unit(k_2), unit(k_1)]))
    assert torch.equal(model.queue.keys[16:], queue[16:])


def test_a_queue_of_its_own_has_the_keys_of_one_view():
    model = make("moco queues")
    queues = [queue.keys.clone() for queue in (model.queue, model.other_queue)]
    given = model.encode(batch())
    loss = model.loss(given).loss
    expected = sum(moco_loss(*both).loss for both in zip(given.trained, given.fixed, queues, strict=True)) / 2
    torch.testing.assert_close(loss, expected, rtol=0, atol=TIGHT)
    for queue, keys in zip((model.queue, model.other_queue), given.fixed, strict=True):
        torch.testing.assert_close(queue.keys[: len(keys)], unit(keys), rtol=0, atol=TIGHT)


def test_moco_in_groups_has_the_statistics_of_each_group():
    """Image i is in query group i mod 2 and key group (i / 2) mod 2; BatchNorm is the formula over a group."""
    plain, split = make("moco v2"), make("moco splits")
    encoded = split.encode(batch())
    for images, made, network, groups in (
        (batch().views[0], encoded.trained[0], (plain.backbone, plain.projector), ([0, 2, 4, 6], [1, 3, 5, 7])),
        (batch().views[1], encoded.fixed[0], tuple(plain.target), ([0, 1, 4, 5], [2, 3, 6, 7])),
    ):
        backbone, projector = network
        maps = backbone.layers[0](images)
        for group in groups:
            own = maps[group]
            mean, variance = own.mean((0, 2, 3), keepdim=True), own.var((0, 2, 3), keepdim=True, unbiased=False)
            features = torch.relu((own - mean) / (variance + 1e-5).sqrt()).mean((2, 3))
            torch.testing.assert_close(made[group], projector(features), rtol=0, atol=TIGHT)
    # Both groups together move the running statistics as far as one batch does.
    slow = 1 - math.sqrt(0.9)
    maps = plain.backbone.layers[0](batch().views[0])
    means = [maps[start::2].mean((0, 2, 3)) for start in (0, 1)]
    expected = (1 - slow) * slow * means[0] + slow * means[1]
    norm = split.backbone.layers[1]
    torch.testing.assert_close(norm.running_mean, expected.detach(), rtol=0, atol=TIGHT)
    assert norm.momentum == 0.1


def test_moco_in_one_group_is_moco():
    """The default; and with running statistics instead of the batch's, groups make no difference."""
    assert moco.Config().bn_splits == 1
    plain, split = make("moco symmetric"), make("moco symmetric")
    split.config = split.config.model_copy(update={"bn_splits": 2})
    for model in (plain, split):
        model.eval()
    expected, made = plain.encode(batch()), split.encode(batch())
    for a, b in zip((*expected.trained, *expected.fixed), (*made.trained, *made.fixed), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TIGHT)
    assert split.encode(batch(), fixed=False).fixed == ()


def test_groups_of_queries_and_keys_share_few_images():
    """Of n images in k groups, each pair of groups has n / k^2 in common: as few as there can be."""
    images = torch.arange(32.0).view(32, 1, 1, 1)
    queries, keys = (moco.grouped(images, 4, digit) for digit in (moco.QUERIES, moco.KEYS))
    for group in (*queries, *keys):
        assert len(group) == 8
    assert {len(set(a.flatten().tolist()) & set(b.flatten().tolist())) for a in queries for b in keys} == {2}
    for digit, groups in ((moco.QUERIES, queries), (moco.KEYS, keys)):
        assert torch.equal(moco.joined([group.flatten(1) for group in groups], digit), images.flatten(1))
    with pytest.raises(UserError, match=r"bn_splits 2: 6 images at once are no multiple of 4"):
        make("moco splits")(batch(count=6))


def test_moco_counts_the_queries_that_find_their_key():
    axes, queue = torch.eye(4, dtype=torch.float64), torch.full((3, 4), 0.5, dtype=torch.float64)
    for signs, share in (([1, 1, 1, 1], 1), ([1, 1, -1, -1], 0.5), ([-1, -1, -1, -1], 0)):
        assert float(moco_loss(axes, torch.tensor(signs)[:, None] * axes, queue).accuracy) == share


def test_a_bank_is_the_keys_of_this_step_and_those_before():
    model = make("bank")
    keys: list[torch.Tensor] = []
    for step in range(4):
        given = Encoded((random(IMAGES, 5, seed=step),), (random(IMAGES, 5, seed=9 + step),))
        keys = [*keys, unit(given.fixed[0])][-2:]
        z = unit(given.trained[0])
        contrast = 8 * sum(dot(row, key) ** 2 for row in z for key in torch.cat(keys)) / (IMAGES * 16)
        expected = contrast - sum(dot(a, b) for a, b in zip(z, keys[-1])) / IMAGES
        assert model.loss(given).loss.item() == pytest.approx(expected, abs=TIGHT)
        assert float(model.diagnostics()["bank_filled"]) == min(1, (step + 1) / 2)


@pytest.mark.parametrize("form", ["moco v2", "bank"])
def test_a_queue_that_the_batch_does_not_divide_is_refused_at_the_first_step(form):
    with pytest.raises(UserError, match="16 keys is not a multiple of the 6"):
        make(form)(batch(count=6))


# ---------------------------------------------------------------------------------------------------- methods


@every_form
def test_it_keeps_the_contract_of_methods(form):
    model = make(form)
    assert isinstance(model, Method)
    output = model(batch())
    assert output.loss.ndim == 0
    assert output.embedding.shape == (IMAGES, 5)
    assert not output.embedding.requires_grad
    expected = make(form).encode(batch()), make(form).encode(batch(), fixed=False)
    assert expected[1].fixed == ()
    assert all(torch.equal(a, b) for a, b in zip(expected[0].trained, expected[1].trained, strict=True))
    jigsaw = Batch((batch().views[0], random(IMAGES, 9, 3, 4, 4)), torch.arange(IMAGES))
    with pytest.raises(UserError, match="jigsaw"):
        model(jigsaw)


def test_the_papers_constants_are_the_defaults():
    config = moco.Config()
    assert (config.head, config.hidden, config.dim, config.temperature) == ("mlp", 2048, 128, 0.2)
    assert (config.queue, config.ema_start, config.ema_end, config.symmetric) == (65536, 0.999, 0.999, False)
    config = byol.Config()
    assert (config.hidden, config.dim, config.ema_start, config.ema_end) == (4096, 256, 0.996, 1.0)
    config = squared_contrastive.Config()
    assert (config.hidden, config.dim, config.rho, config.bank) == (4096, 256, 8.0, 0)
    assert (config.ema_start, config.ema_end) == (0.99, 1.0)


def test_the_heads():
    kinds = lambda head: [type(layer) for layer in head]  # noqa: E731
    assert kinds(make("moco v1").projector) == [nn.Linear]
    assert kinds(make("moco v2").projector) == [nn.Linear, nn.ReLU, nn.Linear]
    model = make("byol")
    assert kinds(model.predictor) == kinds(model.projector) == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert len(model.target) == 2


@pytest.mark.parametrize(
    "recipe, biases", [("imagenet/byol", False), ("cifar10/byol", True), ("cifar10/byol-lightly", True)]
)
def test_byols_last_layers_have_the_biases_of_the_program_that_a_recipe_repeats(recipe, biases):
    config = load_recipe(recipe).method
    model = byol.build(config.model_copy(update={"hidden": 8}), Tiny())
    for part in (model.projector, model.predictor):
        assert [layer.bias is not None for layer in part if isinstance(layer, nn.Linear)] == [False, biases]


def test_byol_compares_each_view_with_the_other():
    model = make("byol")
    moved(model, 5)
    encoded = model.encode(batch())
    view_1, view_2 = batch().views
    p = [model.predictor(model.projector(model.backbone(view))) for view in (view_1, view_2)]
    z = [model.target(view) for view in (view_1, view_2)]
    for made, wanted in zip((*encoded.trained, *encoded.fixed), (*p, *z), strict=True):
        torch.testing.assert_close(made, wanted)
    expected = byol_loss(p[0], z[1]) + byol_loss(p[1], z[0])
    assert model.loss(encoded).loss.item() == pytest.approx(expected.item(), abs=TIGHT)


@every_form
def test_gradients_reach_the_online_network_alone(form):
    model = make(form)
    moved(model, 5)
    model.zero_grad()
    model(batch()).loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("target."):
            assert not parameter.requires_grad
            assert parameter.grad is None
        else:
            assert parameter.grad.abs().max() > 0, name
    assert not any(value.requires_grad for value in model.buffers())


@every_form
@pytest.mark.parametrize("progress", [0.0, 0.4, torch.tensor(0.4)])
def test_the_target_follows_after_the_step(form, progress):
    model = make(form)
    moved(model, 0)
    online = [*model.backbone.parameters(), *model.projector.parameters()]
    before = [parameter.clone() for parameter in model.target.parameters()]
    start, end = model.config.ema_start, model.config.ema_end
    decay = end - (end - start) * (math.cos(math.pi * float(progress)) + 1) / 2
    logged = model.after_step(progress)
    assert float(logged["ema_decay"]) == pytest.approx(decay, abs=1e-6)
    for now, old, leader in zip(model.target.parameters(), before, online, strict=True):
        torch.testing.assert_close(now.data, decay * old + (1 - decay) * leader.data, rtol=0, atol=1e-6)


@every_form
def test_evaluation_mode_moves_nothing(form):
    model = make(form)
    moved(model, 0)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model(batch(1)).loss, model(batch(1)).loss
    first.backward()
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Watched(TorchDispatchMode):
    """Notes operations that bring a value or a shape from the device to the host: a recorded step must have none."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(name in str(function) for name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal.default")):
            self.asked.append(str(function))
        return function(*arguments, **(keywords or {}))


@every_form
def test_a_step_asks_the_device_for_no_value(form):
    model, given, progress = make(form), batch(), torch.tensor(0.5)
    with Watched() as watched:
        output = model(given)
        output.loss.backward()
        model.after_step(progress)
        assert watched.asked == []
        output.loss.item()
        assert watched.asked == ["aten._local_scalar_dense.default"]


@every_form
def test_the_state_is_complete(form):
    model, other = make(form), make(form, seed=3)
    for number in range(3):
        moved(model, number)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for number in range(3, 7):
        assert torch.equal(moved(model, number), moved(other, number))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@every_form
def test_a_step_lowers_the_loss(form):
    module, values = FORMS[form]
    torch.manual_seed(0)
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16)
    model = module.build(module.Config(**values | {"hidden": 16, "dim": 8}), backbone).train()
    views = tuple(torch.randn(IMAGES, 3, 16, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    encoded = model.encode(Batch(views, torch.arange(IMAGES)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model.loss(encoded).loss
    loss.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                state[name] = parameter - 0.01 * parameter.grad
    model.load_state_dict(state)  # the queue as it was, the weights after the step
    assert model(Batch(views, torch.arange(IMAGES))).loss < loss - 1e-5


# ---------------------------------------------------------------------------------------------------- two processes


def share(rank: int) -> dict:
    results = {}
    for form in FORMS:
        mine = slice(4 * rank, 4 * rank + 4)
        results[form] = one_step(share_statistics(make(form)), tuple(view[mine] for view in batch().views))
    return results


def test_two_processes_equal_one(tmp_path):
    both = in_two_processes(share, tmp_path)
    for form in FORMS:
        alone = one_step(make(form), batch().views)
        for together in both:
            torch.testing.assert_close(together[form]["loss"], alone["loss"], rtol=1e-11, atol=1e-12, msg=form)
            for kind in ("gradient", "state"):
                assert together[form][kind].keys() == alone[kind].keys()
                for name, value in alone[kind].items():
                    message = f"{form}: {name}"
                    torch.testing.assert_close(together[form][kind][name], value, rtol=1e-8, atol=1e-11, msg=message)


# ---------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("cifar10/moco-v2", {"method.queue": 128}),
        ("cifar10/byol", {}),
        ("cifar10/squared-contrastive", {"method.bank": 64}),
        ("imagenet/moco", {"method.queue": 64, "method.bn_splits": 2, "data.mean": [0.5] * 3, "data.std": [0.2] * 3}),
    ],
)
def test_a_recipe_trains(recipe, changes, tmp_path, tiny):
    tiny |= {"data.source": "textures", "training.epochs": 1, "optimizer.warmup_epochs": 0.0}
    run = pretrain(recipe, out=tmp_path / "run", overrides=tiny | changes)
    assert all(math.isfinite(line["loss"]) for line in run.metrics())


def test_a_slice_of_the_batch_that_cannot_be_grouped_is_refused_before_training(tmp_path, tiny, monkeypatch):
    """With four processes each has 8 images, which make no 4 groups; the recipe is right for one or two."""
    settings = tiny | {"data.source": "textures", "method.queue": 64, "method.bn_splits": 4}
    monkeypatch.setattr("tico_ssl.runtime.distributed.world_size", lambda: 4)
    with pytest.raises(UserError, match=r"^method\.bn_splits 4: 8 images at once are no multiple of 16$"):
        pretrain("imagenet/moco", out=tmp_path / "run", overrides=settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "splits"), [("imagenet/moco", 8), ("imagenet/moco-v2", 8), ("cifar10/moco", 8)])
def test_recipes_after_the_authors_code_have_its_eight_groups(name, splits):
    """Eight GPUs on ImageNet, and SplitBatchNorm of the notebook for CIFAR."""
    recipe = load_recipe(name)
    assert recipe.method.bn_splits == splits
    assert recipe.training.batch_size % splits**2 == 0


@pytest.mark.parametrize(
    "name",
    [
        *(f"imagenet/{name}" for name in ("moco", "moco-v2", "byol", "squared-contrastive")),
        *(f"cifar10/{name}" for name in ("moco-v2", "byol", "squared-contrastive")),
    ],
)
def test_queues_of_packaged_recipes_suit_their_batches(name):
    recipe = load_recipe(name)
    keys = getattr(recipe.method, "queue", 0) or getattr(recipe.method, "bank", 0)
    assert keys % (recipe.training.batch_size * (1 + getattr(recipe.method, "symmetric", False))) == 0
