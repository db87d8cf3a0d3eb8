"""SimCLR, Barlow Twins, VICReg and SimSiam: their losses against naive sums, and what training does with them."""

import copy
import math

import pytest
import torch
from torch import nn

from test_distributed import Tiny, in_two_processes, the_views
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.methods import barlow_twins, simclr, simsiam, vicreg
from tico_ssl.methods._base import Batch, Encoded, Method
from tico_ssl.methods.barlow_twins import barlow_twins_loss, off_diagonal
from tico_ssl.methods.simclr import nt_xent_loss
from tico_ssl.methods.simsiam import simsiam_loss
from tico_ssl.methods.vicreg import vicreg_loss
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.optim.groups import build_optimizer, set_learning_rate
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.plan import Plan
from tico_ssl.training.start import pretrain

MODULES = {"simclr": simclr, "barlow-twins": barlow_twins, "vicreg": vicreg, "simsiam": simsiam}
SHAPES = [(2, 3), (5, 4), (8, 6), (3, 9)]


def random(*shape: int, seed: int = 0, count: int = 2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


# ------------------------------------------------------------------------------------------- naive sums, plain Python


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def column(z, j) -> list[float]:
    return [row[j] for row in z]


def average(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def naive_nt_xent(z_1, z_2, temperature) -> float:
    z, n = z_1.tolist() + z_2.tolist(), len(z_1)
    losses = []
    for i in range(2 * n):
        other = i + n if i < n else i - n
        below = sum(math.exp(cosine(z[i], z[k]) / temperature) for k in range(2 * n) if k != i)
        losses.append(-math.log(math.exp(cosine(z[i], z[other]) / temperature) / below))
    return average(losses)


def standardised(values) -> list[float]:
    mean = average(values)
    variance = average((value - mean) ** 2 for value in values)
    return [(value - mean) / math.sqrt(variance + 1e-5) for value in values]


def naive_barlow_twins(z_1, z_2, weight) -> float:
    d = z_1.shape[1]
    one, two = ([standardised(column(z.tolist(), j)) for j in range(d)] for z in (z_1, z_2))
    total = 0.0
    for i in range(d):
        for j in range(d):
            c = dot(one[i], two[j]) / len(z_1)
            total += (1 - c) ** 2 if i == j else weight * c**2
    return total


def naive_vicreg(z_1, z_2, invariance, variance, covariance) -> float:
    n, d = z_1.shape
    total = invariance * average((z_1[i, j].item() - z_2[i, j].item()) ** 2 for i in range(n) for j in range(d))
    for z in (z_1.tolist(), z_2.tolist()):
        columns = [[x - average(column(z, j)) for x in column(z, j)] for j in range(d)]
        cov = [[dot(a, b) / (n - 1) for b in columns] for a in columns]
        total += variance * 0.5 * average(max(0.0, 1 - math.sqrt(cov[j][j] + 1e-4)) for j in range(d))
        total += covariance / d * sum(cov[i][j] ** 2 for i in range(d) for j in range(d) if i != j)
    return total


def naive_simsiam(p_1, p_2, z_1, z_2) -> float:
    rows = zip(*(tensor.tolist() for tensor in (p_1, p_2, z_1, z_2)), strict=True)
    return -average((cosine(a, d) + cosine(b, c)) / 2 for a, b, c, d in rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_nt_xent_is_its_formula(shape, temperature):
    z_1, z_2 = random(*shape)
    terms = nt_xent_loss(z_1, z_2, temperature)
    assert float(terms.loss) == pytest.approx(naive_nt_xent(z_1, z_2, temperature), rel=1e-12)
    assert float(terms.alignment + terms.uniformity) == pytest.approx(float(terms.loss), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", [0.0, 0.0051, 1.0])
def test_barlow_twins_is_its_formula(shape, weight):
    z_1, z_2 = random(*shape)
    terms = barlow_twins_loss(z_1, z_2, weight)
    assert float(terms.loss) == pytest.approx(naive_barlow_twins(z_1, z_2, weight), rel=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [(25.0, 25.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)])
def test_vicreg_is_its_formula(shape, weights):
    z_1, z_2 = (0.8 * z for z in random(*shape))
    terms = vicreg_loss(z_1, z_2, *weights)
    assert float(terms.loss) == pytest.approx(naive_vicreg(z_1, z_2, *weights), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_simsiam_is_its_formula(shape):
    tensors = random(*shape, count=4)
    assert float(simsiam_loss(*tensors)) == pytest.approx(naive_simsiam(*tensors), rel=1e-12)


@pytest.mark.parametrize("loss", [nt_xent_loss, barlow_twins_loss, vicreg_loss])
def test_gradients_are_those_of_the_value(loss):
    z_1, z_2 = (z.requires_grad_() for z in random(4, 3))
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b).loss, (z_1, z_2))


def test_off_diagonal():
    assert off_diagonal(torch.arange(9).view(3, 3)).flatten().tolist() == [1, 2, 3, 5, 6, 7]


# ------------------------------------------------------------------------------------------- known values


@pytest.mark.parametrize("n", [2, 7])
def test_collapse_has_its_known_loss(n):
    same = torch.ones(n, 5, dtype=torch.float64)
    assert float(nt_xent_loss(same, same, 0.1).loss) == pytest.approx(math.log(2 * n - 1))
    assert float(barlow_twins_loss(same, same).loss) == pytest.approx(5.0)
    assert float(vicreg_loss(same, same).loss) == pytest.approx(25 * 0.99)
    assert float(simsiam_loss(same, same, same, same)) == pytest.approx(-1.0)


def test_the_collapsed_loss_of_a_method_is_that_of_one_point():
    assert small("simclr").collapsed_loss() is None  # depends on the batch
    for name in ("barlow-twins", "vicreg", "simsiam"):
        method = small(name)
        assert method.collapsed_loss() == pytest.approx(float(method.loss(one_point(name)).loss), rel=1e-5), name
    scaled = small("barlow-twins", scale=0.1)
    assert scaled.collapsed_loss() == pytest.approx(float(scaled.loss(one_point("barlow-twins")).loss), rel=1e-5)


def one_point(name):
    same = (torch.ones(6, 8), torch.ones(6, 8))
    return Encoded(same, same if name == "simsiam" else ())


def test_perfect_views():
    """Each loss where its terms vanish: every image apart from the others and the same in both views."""
    corners = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)  # uncorrelated, mean 0
    assert float(barlow_twins_loss(corners, corners, 1.0).loss) == pytest.approx(0, abs=1e-9)
    assert float(vicreg_loss(corners, corners).loss) == pytest.approx(0, abs=1e-12)
    assert float(vicreg_loss(corners, corners + 2).loss) == pytest.approx(25 * 4)
    assert float(simsiam_loss(corners, corners, 3 * corners, 2 * corners)) == pytest.approx(-1)
    assert float(simsiam_loss(corners, corners, -corners, -corners)) == pytest.approx(1)
    axes = torch.eye(4, dtype=torch.float64)
    expected = math.log((math.exp(1 / 0.2) + 6) / math.exp(1 / 0.2))  # one positive, six negatives at right angles
    assert float(nt_xent_loss(axes, 5 * axes, 0.2).loss) == pytest.approx(expected)


def test_lengths_do_not_matter_where_they_should_not():
    a, b, c, d = random(5, 4, count=4)
    assert torch.allclose(nt_xent_loss(3 * a, b).loss, nt_xent_loss(a, 7 * b).loss)
    assert torch.allclose(simsiam_loss(3 * a, b, c, d), simsiam_loss(a, b, 2 * c, d))
    assert torch.allclose(barlow_twins_loss(100 * a + 3, 90 * b).loss, barlow_twins_loss(100 * a, 90 * b - 1).loss)


@pytest.mark.parametrize("loss", [nt_xent_loss, barlow_twins_loss, vicreg_loss])
def test_views_may_change_places(loss):
    a, b = random(6, 4)
    assert torch.allclose(loss(a, b).loss, loss(b, a).loss)


@pytest.mark.parametrize("loss", [nt_xent_loss, barlow_twins_loss, vicreg_loss])
def test_embeddings_that_do_not_fit_are_refused(loss):
    for a, b in [((4, 3), (4, 2)), ((4, 3), (5, 3)), ((1, 3), (1, 3)), ((0, 3), (0, 3)), ((4,), (4,))]:
        with pytest.raises(ValueError, match=r"embeddings|at least two"):
            loss(torch.zeros(a), torch.zeros(b))
    with pytest.raises(ValueError, match="temperature"):
        nt_xent_loss(*random(3, 2), temperature=0.0)


@pytest.mark.parametrize("loss", [nt_xent_loss, barlow_twins_loss, vicreg_loss])
def test_half_precision_is_left_at_the_door(loss):
    a, b = (z.to(torch.bfloat16) for z in random(16, 8))
    with torch.autocast("cpu", torch.bfloat16):
        terms = loss(a, b)
    assert all(term.dtype == torch.float32 for term in terms)
    assert torch.allclose(terms.loss.double(), loss(a.double(), b.double()).loss, rtol=1e-5)


def test_simsiam_leaves_half_precision_at_the_door():
    tensors = [z.to(torch.bfloat16) for z in random(16, 8, count=4)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = simsiam_loss(*tensors)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss.double(), simsiam_loss(*(z.double() for z in tensors)), rtol=1e-5)


# ------------------------------------------------------------------------------------------- methods


def small(name: str, backbone: nn.Module | None = None, **settings):
    torch.manual_seed(0)
    return MODULES[name].build(MODULES[name].Config(hidden=8, dim=8, **settings), backbone or Tiny())


def batch_of(n: int = 16, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(n, 3, size, size, generator=generator)
    views = tuple(image + 0.3 * torch.randn(n, 3, size, size, generator=generator) for _ in range(2))
    return Batch(views, torch.arange(n))


@pytest.mark.parametrize("name", MODULES)
def test_a_method_keeps_the_contract(name):
    method = small(name)
    assert isinstance(method, Method)
    assert MODULES[name].Config().name == name
    output = method(batch_of())
    assert output.loss.ndim == 0
    assert output.embedding.shape == (16, 8)
    assert not output.embedding.requires_grad
    if output.terms:
        torch.testing.assert_close(sum(output.terms.values()), output.loss)
    assert method.after_step(0.5) == {}
    assert method.diagnostics() == {}
    output.loss.backward()
    for parameter_name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
    trained_alone = method.encode(batch_of(), fixed=False)
    assert len(trained_alone.trained) == 2
    assert trained_alone.fixed == ()


@pytest.mark.parametrize("name", [name for name in MODULES if name != "simclr"])
def test_views_do_not_share_statistics(name):
    """What view one becomes does not depend on view two."""
    one, other = batch_of(), batch_of()
    changed = Batch((other.views[0], 5 + 3 * other.views[1]), other.index)
    first = small(name).encode(one)
    second = small(name).encode(changed)
    assert torch.equal(first.trained[0], second.trained[0])
    assert not torch.equal(first.trained[1], second.trained[1])


@pytest.mark.parametrize("name", MODULES)
def test_jigsaws_are_refused_in_one_line(name):
    views = (torch.zeros(4, 9, 3, 8, 8), torch.zeros(4, 3, 8, 8))
    with pytest.raises(UserError, match="jigsaw"):
        small(name)(Batch(views, torch.arange(4)))


@pytest.mark.parametrize("name", MODULES)
def test_steps_on_fixed_images_lower_the_loss(name):
    method = small(name, build_backbone(BackboneConfig(name="tico/resnet10-w4", zero_gamma=False), 16)).train()
    optimizer = torch.optim.SGD(method.parameters(), lr=0.02 if name != "vicreg" else 0.002)
    losses = []
    for _ in range(2):
        output = method(batch_of())
        losses.append(float(output.loss.detach()))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]


def test_simsiams_gradient_stops():
    tensors = [tensor.requires_grad_() for tensor in random(5, 4, count=4)]
    simsiam_loss(*tensors).backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, True, False, False]
    for prediction in tensors[:2]:
        assert prediction.grad.abs().sum() > 0


def test_simsiams_network_learns_through_the_predictor_alone():
    """With a predictor that says the same of every image, nothing reaches the backbone, though z depends on it."""
    method = small("simsiam")
    with torch.no_grad():
        method.predictor[-1].weight.zero_()
        method.predictor[-1].bias.fill_(1.0)
    method(batch_of()).loss.backward()
    for module in (method.backbone, method.projector):
        assert all(float(p.grad.abs().max()) == 0 for p in module.parameters())
    assert method.predictor[-1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("affine", [False, True])
def test_simsiams_embeddings_have_unit_variance_unless_the_network_may_weigh_their_dimensions(affine):
    method = small("simsiam", last_affine=affine)
    z = method.embed_views(batch_of().images(2))[0]
    torch.testing.assert_close(z.var(dim=0, unbiased=False), torch.ones(8), atol=1e-2, rtol=0)
    weight = method.projector[-1].weight
    assert (weight is not None) == affine
    if affine:
        torch.nn.init.constant_(weight, 3.0)
        z = method.embed_views(batch_of().images(2))[0]
        torch.testing.assert_close(z.var(dim=0, unbiased=False), torch.full((8,), 9.0), atol=0.1, rtol=0)


def kinds(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module]


# --------------------------------------------------------------------- Barlow Twins' gradient on several processes


def normalised(rows):
    """SyncBatchNorm: every process normalises its rows by the statistics of all."""
    everything = torch.cat(rows)
    mean, variance = everything.mean(0), everything.var(0, unbiased=False)
    return [(own - mean) / (variance + 1e-5).sqrt() for own in rows]


def on_processes(layers, prefix, rows, weights):
    """Rows of all processes through a network of which each process has its own copy of the weights."""
    for number, layer in enumerate(layers):
        own = [{key: one.get(f"{prefix}.{number}.{key}") for key in ("weight", "bias")} for one in weights]
        if isinstance(layer, nn.Linear):
            rows = [nn.functional.linear(row, **one) for row, one in zip(rows, own, strict=True)]
        elif isinstance(layer, nn.BatchNorm1d):
            rows = normalised(rows)
            rows = [row * one["weight"] + one["bias"] for row, one in zip(rows, own, strict=True)]
        else:
            rows = [layer(row) for row in rows]
    return rows


def gradient_of_the_authors_code(method, views, processes, redundancy_weight):
    """Every process multiplies its own rows; these shares are summed outside autograd, so that a process differentiates
    the loss of the sum by its own share alone; DistributedDataParallel averages the gradients of the weights."""
    weights = [
        {name: parameter.detach().clone().requires_grad_() for name, parameter in method.named_parameters()}
        for _ in range(processes)
    ]
    z = []
    for view in views:
        rows = on_processes(method.backbone, "backbone", list(view.chunk(processes)), weights)
        z.append(normalised(on_processes(method.projector, "projector", rows, weights)))
    shares = [one.T @ other / len(views[0]) for one, other in zip(*z, strict=True)]
    total = sum(share.detach() for share in shares)
    losses = []
    for share in shares:
        c = share + (total - share.detach())  # the value of the sum, the gradient of the share
        off = c - torch.diag(c.diagonal())
        losses.append((c.diagonal() - 1).square().sum() + redundancy_weight * off.square().sum())
    sum(losses).backward()  # SyncBatchNorm's backward pass adds up what comes from all processes
    return {name: sum(own[name].grad for own in weights) / processes for name in weights[0]}


def small_barlow_twins(**settings):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU())
    config = barlow_twins.Config(hidden=8, dim=5, **settings)
    return barlow_twins.BarlowTwins(backbone, 7, config).double().train()


def backward(method, views):
    method.loss(Encoded(tuple(method.embed(view) for view in views))).loss.backward()


@pytest.mark.parametrize("processes", [1, 2, 16])
def test_barlow_twins_gradient_in_the_authors_code_is_divided_by_the_processes(processes):
    views = random(32, 6)
    method = small_barlow_twins(scale=1 / processes)
    backward(method, views)
    expected = gradient_of_the_authors_code(method, views, processes, 0.0051)
    for name, parameter in method.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)


def test_a_step_of_the_barlow_twins_recipe_is_the_authors_on_16_gpus():
    """Biases and normalisation: 0.0048 times the gradient, without adaptation and decay; weights: LARS at 0.2."""
    recipe = load_recipe("imagenet/barlow-twins")
    method, views = small_barlow_twins(scale=recipe.method.scale), random(32, 6)
    gradients = gradient_of_the_authors_code(method, views, 16, 0.0051)
    before = {name: parameter.detach().clone() for name, parameter in method.named_parameters()}
    optimizer = build_optimizer(method, recipe.optimizer)
    set_learning_rate(optimizer, Plan.of(recipe, steps_per_epoch=625).peak_lr)
    backward(method, views)
    optimizer.step()
    for name, parameter in method.named_parameters():
        p, g = before[name], gradients[name]
        if p.ndim == 1:
            update = 0.0048 * 2048 / 256 * g
        else:
            g = g + 1e-6 * p
            update = 0.2 * 2048 / 256 * g * 0.001 * p.norm() / g.norm()
        torch.testing.assert_close(parameter.detach(), p - update, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------- SimSiam's fixed predictor


def test_simsiams_predictor_keeps_its_rate_as_in_the_authors_code():
    """Their code: SGD with two groups, of which the cosine moves the first; weight decay of everything."""
    torch.manual_seed(0)
    settings = {"hidden": 8, "dim": 6, "predictor_hidden": 4, "fix_predictor_rate": True}
    backbone = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU())
    method = simsiam.SimSiam(backbone, 7, simsiam.Config(**settings)).double().train()
    theirs = copy.deepcopy(method)
    recipe = load_recipe("imagenet/simsiam", {"training.epochs": 8})
    plan = Plan.of(recipe, steps_per_epoch=1)
    optimizer = build_optimizer(method, recipe.optimizer, plan.peak_lr, method.fixed_rate())
    network = [*theirs.backbone.parameters(), *theirs.projector.parameters()]
    groups = [{"params": network, "fix": False}, {"params": theirs.predictor.parameters(), "fix": True}]
    sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(8):
        views = random(16, 6, seed=epoch)
        for group in sgd.param_groups:
            group["lr"] = 0.05 if group["fix"] else 0.05 * (1 + math.cos(math.pi * epoch / 8)) / 2
        set_learning_rate(optimizer, plan.lr(epoch))
        for model, steps in ((method, optimizer), (theirs, sgd)):
            steps.zero_grad()
            z = [model.embed(view) for view in views]
            model.loss(Encoded(tuple(model.predictor(one) for one in z), tuple(z))).loss.backward()
            steps.step()
    for (name, mine), other in zip(method.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13, msg=name)


def test_a_fixed_rate_is_logged_and_outside_the_warmup(tmp_path, tiny):
    settings = {"method.name": "simsiam", "method.predictor_hidden": 4, "method.fix_predictor_rate": True}
    optimizer = {"name": "sgd", "lr": 0.4, "warmup_epochs": 1.0}
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | settings | {"optimizer": optimizer})
    lines = [line for line in run.metrics() if "lr" in line]
    assert [line["lr"] for line in lines][:3] == pytest.approx([0.0, 0.05 / 3, 0.1 / 3])
    assert {line["fixed_lr"] for line in lines} == {0.4 * 32 / 256}


def test_heads_are_the_papers():
    with torch.device("meta"):
        backbone = nn.Identity()
        heads = {name: module.build(module.Config(), _wide(backbone)) for name, module in MODULES.items()}
    shapes = {
        name: [tuple(m.weight.shape) for m in method.projector if isinstance(m, nn.Linear)]
        for name, method in heads.items()
    }
    assert shapes == {
        "simclr": [(2048, 2048), (128, 2048)],
        "barlow-twins": [(8192, 2048), (8192, 8192), (8192, 8192)],
        "vicreg": [(8192, 2048), (8192, 8192), (8192, 8192)],
        "simsiam": [(2048, 2048), (2048, 2048), (2048, 2048)],
    }
    block = ["Linear", "BatchNorm1d", "ReLU"]
    assert kinds(heads["simclr"].projector) == [*block, "Linear", "BatchNorm1d"]
    assert kinds(heads["barlow-twins"].projector) == [*block, *block, "Linear"]
    assert kinds(heads["vicreg"].projector) == [*block, *block, "Linear"]
    assert kinds(heads["simsiam"].projector) == [*block, *block, "Linear", "BatchNorm1d"]
    assert kinds(heads["simsiam"].predictor) == [*block, "Linear"]
    for method in heads.values():
        assert all(m.bias is None for m in method.projector if isinstance(m, nn.Linear))
    last = heads["simclr"].projector[-1]  # gamma alone
    assert last.weight.requires_grad
    assert not last.bias.requires_grad
    lightly = simclr.SimCLR(backbone, 2048, load_recipe("cifar10/simclr-lightly").method).projector[-1]
    assert lightly.bias.requires_grad
    assert not heads["simsiam"].projector[-1].affine
    assert heads["simsiam"].predictor[-1].bias is not None
    plain = simclr.SimCLR(backbone, 2048, simclr.Config(hidden=4, dim=4, batch_norm=False)).projector
    assert kinds(plain) == ["Linear", "ReLU", "Linear"]
    assert all(m.bias is not None for m in plain if isinstance(m, nn.Linear))


@pytest.mark.parametrize("joint", [True, False])
def test_simclr_views_share_statistics_in_a_joint_pass(joint):
    """Its first BatchNorm has the mean of both views; otherwise of one after the other."""
    torch.manual_seed(0)
    method = simclr.SimCLR(nn.Flatten(), 12, simclr.Config(hidden=5, dim=4, joint_pass=joint)).double().train()
    views = tuple(torch.randn(8, 3, 2, 2, dtype=torch.float64) + shift for shift in (0, 1))
    means = [method.projector[0](view.flatten(1)).mean(dim=0).detach() for view in views]
    encoded = method.encode(Batch(views, torch.arange(8)))
    expected = 0.1 * (means[0] + means[1]) / 2 if joint else 0.09 * means[0] + 0.1 * means[1]
    torch.testing.assert_close(method.projector[1].running_mean, expected, rtol=0, atol=1e-12)
    together = torch.cat(encoded.trained)
    for z in (together,) if joint else encoded.trained:  # the last BatchNorm only scales: means are zero
        torch.testing.assert_close(z.mean(dim=0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)


def _wide(backbone: nn.Module) -> nn.Module:
    backbone.width = 2048
    return backbone


@pytest.mark.parametrize(
    ("name", "optimizer", "peak", "end", "decay", "batch", "epochs"),
    [
        ("simclr", "lars", 4.8, 0, 1e-6, 4096, 1000),
        ("moco", "sgd", 0.03, 3e-4, 1e-4, 256, 200),
        ("moco-v2", "sgd", 0.03, 0, 1e-4, 256, 800),
        ("pirl", "sgd", 0.12, 1.2e-4, 1e-4, 1024, 800),
        ("simsiam", "sgd", 0.05, 0, 1e-4, 256, 800),
        ("swav", "lars", 4.8, 0.0048, 1e-6, 4096, 800),
        ("barlow-twins", "lars", 1.6, 0.0016, 1e-6, 2048, 1000),
        ("byol", "lars", 3.2, 0, 1.5e-6, 4096, 1000),
        ("vicreg", "lars", 1.6, 0.0016, 1e-6, 2048, 1000),
        ("tico", "lars", 3.2, 0.032, 1.5e-6, 4096, 1000),
    ],
)
def test_runs_are_the_publications(name, optimizer, peak, end, decay, batch, epochs):
    recipe = load_recipe(f"imagenet/{name}")
    plan = Plan.of(recipe, steps_per_epoch=10)
    assert recipe.optimizer.scale_lr
    assert (recipe.optimizer.name, recipe.optimizer.weight_decay) == (optimizer, decay)
    assert (plan.peak_lr, plan.lr(plan.steps)) == pytest.approx((peak, end))
    assert (recipe.training.batch_size, recipe.training.epochs) == (batch, epochs)
    assert (recipe.backbone.name, recipe.data.image_size) == ("torchvision/resnet50", 224)


ALL_DECAY = {"moco", "moco-v2", "simsiam", "supervised"}  # SGD of all parameters in their code, and in solo-learn's


@pytest.mark.parametrize("name", [name for name in packaged_recipes() if "/" in name])
def test_optimisers_are_those_of_the_original_code(name):
    data, method = name.split("/")
    recipe = load_recipe(name)
    optimizer = recipe.optimizer
    larc = method == "swav" and data == "imagenet"  # apex's, of all parameters
    lightly = method.endswith("-lightly")
    solo_learn = data == "cifar10" and optimizer.name == "lars"
    like_moco = name == "cifar10/pirl"
    decays_all = method in ALL_DECAY or larc or like_moco or (lightly and optimizer.name == "sgd")
    assert optimizer.decay_all == decays_all
    assert optimizer.adapt_all == larc
    assert optimizer.separate_norms == (larc or solo_learn)
    assert (optimizer.clip_trust, optimizer.trust_coefficient) == ((True, 0.02) if solo_learn else (False, 1e-3))
    assert (optimizer.schedule == "steps") == (name in ("imagenet/moco", "imagenet/supervised"))
    assert getattr(recipe.method, "fix_predictor_rate", False) == (method == "simsiam")


def test_a_backbone_that_does_not_say_its_width():
    with pytest.raises(ValueError, match="width"):
        simclr.SimCLR(nn.Identity())


@pytest.mark.parametrize("name", MODULES)
def test_a_run_with_each_method(name, tmp_path, tiny):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | {"method": {"name": name, "hidden": 16, "dim": 8}})
    records = run.metrics()
    assert all(math.isfinite(record["loss"]) for record in records)


@pytest.mark.parametrize("name", MODULES)
def test_a_run_in_parts(name, tmp_path, tiny):
    changes = tiny | {"method": {"name": name, "hidden": 16, "dim": 8}, "training.parts": 2, "training.epochs": 1}
    assert pretrain("demo", out=tmp_path / "run", overrides=changes).metrics()


# ------------------------------------------------------------------------------------------- two processes


def share(rank: int):
    """Of each method, the loss of this process's half and the mean over both processes."""
    losses = {}
    for name in MODULES:
        method = share_statistics(small(name).double().train())
        local = method(Batch(tuple(view[4 * rank : 4 * rank + 4] for view in the_views()), torch.arange(4))).loss
        losses[name] = local.detach(), distributed.all_mean(local.detach())
    return losses


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_every_process_has_the_loss_of_all_images(tmp_path):
    """But SimSiam, whose loss is a mean over images: there the mean over processes is that of all."""
    for losses in in_two_processes(share, tmp_path):
        for name, (local, mean) in losses.items():
            alone = small(name).double().train()(Batch(the_views(), torch.arange(8))).loss
            torch.testing.assert_close(mean, alone.detach(), rtol=1e-11, atol=1e-12)
            if name != "simsiam":
                torch.testing.assert_close(local, mean, rtol=1e-12, atol=0)
