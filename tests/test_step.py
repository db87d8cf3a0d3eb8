"""A step is the same however it is carried out: eager, compiled, captured, in parts, with activations forgotten."""

import copy
import shutil
import socket

import pytest
import torch
from torch import nn

from tico_ssl.config.recipe import load_recipe
from tico_ssl.methods._base import Batch, Encoded
from tico_ssl.methods.tico import Config, TiCo
from tico_ssl.networks.batch_norm import kept_statistics
from tico_ssl.networks.recomputing import recompute_blocks
from tico_ssl.optim.groups import build_optimizer, load_optimizer
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.errors import UserError
from tico_ssl.training import step as step_module
from tico_ssl.training.setup import build_method
from tico_ssl.training.start import pretrain
from tico_ssl.training.step import Step, _anyones, resolve_execution
from tico_ssl.views.executor import Views

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 20
CALM = 1e-4  # a rate at which small differences stay small


def recipe_of(**changes):
    settings = {
        "data.image_size": 16,
        "backbone.name": "tico/resnet10-w4",
        "method.hidden": 16,
        "method.dim": 8,
        "method.view_order": "alternate",
        "training.batch_size": 16,
        "training.precision": "fp32",
        "training.clip_gradient": 5.0,
    }
    return load_recipe("demo", settings | changes)


def trained(recipe, device, steps=STEPS, lr=0.01):
    """The losses of some steps on fixed images, and the state that they end in."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    fallbacks.drain()  # those of other tests
    training = recipe.training
    precision = torch.float64 if training.precision == "fp64" else torch.float32
    method = build_method(recipe, device, precision)
    views = Views(recipe.views, recipe.data.image_size, recipe.data.mean, recipe.data.std, precision)
    optimizer = build_optimizer(method, recipe.optimizer)
    step = Step(method, optimizer, views, precision, device, training.clip_gradient, training.execution, training.parts)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(steps):
        images = torch.randint(0, 256, (16, 3, 20, 20), dtype=torch.uint8, generator=generator)
        decisions = views.decide(views.draw(16, generator), torch.full((16, 2), 20.0))
        raw = RawBatch(images.to(device), decisions.to(device), torch.arange(16, device=device))
        outcome = step(raw, lr * (number + 1) / steps, number / steps)
        losses.append(float(outcome.output.loss.detach()))
    step.close()
    return losses, {name: value.cpu() for name, value in method.state_dict().items()}


def assert_alike(one, other, tolerance):
    (losses, state), (other_losses, other_state) = one, other
    assert losses == pytest.approx(other_losses, rel=tolerance, abs=tolerance)
    for name, value in state.items():
        torch.testing.assert_close(
            value, other_state[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


# ------------------------------------------------------------------------------------------------- executions


def test_auto_is_captured_on_one_gpu_and_eager_elsewhere():
    assert resolve_execution("auto", CPU) == "eager"
    assert resolve_execution("auto", GPU) == "captured"
    assert resolve_execution("captured", CPU) == "eager"
    assert resolve_execution("compiled and captured", CPU) == "compiled"
    assert resolve_execution("compiled", GPU) == "compiled"


def test_several_processes_capture_as_well_but_nothing_that_is_compiled(monkeypatch):
    monkeypatch.setattr(distributed, "active", lambda: True)
    assert resolve_execution("auto", GPU) == "captured"
    assert resolve_execution("auto", CPU) == "eager"
    assert resolve_execution("compiled and captured", GPU) == "compiled"


def test_a_step_is_captured_in_all_processes_or_in_none(monkeypatch):
    mine = RuntimeError("a value\nwas asked for")
    assert (_anyones(None), _anyones(mine)) == (None, mine)
    monkeypatch.setattr(distributed, "everyone", lambda value: [value, None, "out of memory"])
    assert str(_anyones(None)) == "process 2: out of memory"
    assert _anyones(mine) is mine


@needs_gpu
def test_recorded_collectives_of_one_process_change_no_bit(monkeypatch):
    """A process group of one process, taken for one of several: gradients, statistics and covariance go through NCCL in
    the captured step. Without cuDNN, whose algorithms are chosen by their speed."""
    recipe = recipe_of(**{"training.execution": "captured"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with torch.backends.cudnn.flags(enabled=False):
        plain = trained(recipe, GPU)
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=GPU)
        try:
            monkeypatch.setattr(distributed, "active", torch.distributed.is_initialized)
            recorded = trained(recipe, GPU)
        finally:
            torch.distributed.destroy_process_group()
    assert fallbacks.drain() == {}
    assert recorded[0] == plain[0]
    assert [name for name, value in plain[1].items() if not torch.equal(value, recorded[1][name])] == []


DOUBLE = {"training.precision": "fp64"}  # in float32 twenty steps carry rounding on to the second digit


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_steps_are_the_eager_ones_on_a_cpu():
    compiled = trained(recipe_of(**DOUBLE, **{"training.execution": "compiled"}), CPU)
    assert fallbacks.drain() == {}
    assert_alike(compiled, trained(recipe_of(**DOUBLE), CPU), 1e-8)


@needs_gpu
@pytest.mark.parametrize("optimizer", ["lars", "sgd", "adamw"])
@pytest.mark.parametrize("execution", ["captured", "compiled", "compiled and captured"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 2e-3)])
def test_all_executions_agree_on_a_gpu(execution, optimizer, precision, tolerance):
    """In float64 what is carried out is the same; in float32, where fused kernels take part, orders of sums differ, and
    every step carries that on."""
    changes = {"optimizer.name": optimizer, "training.precision": precision}
    other = trained(recipe_of(**changes, **{"training.execution": execution}), GPU, lr=CALM)
    assert fallbacks.drain() == {}
    eager = trained(recipe_of(**changes, **{"training.execution": "eager"}), GPU, lr=CALM)
    assert_alike(other, eager, tolerance)


@needs_gpu
def test_the_gpu_computes_what_the_cpu_computes():
    """Over a few steps, since their views differ by rounding already."""
    assert_alike(trained(recipe_of(), GPU, 5, CALM), trained(recipe_of(), CPU, 5, CALM), 5e-3)


@pytest.fixture
def no_compiler(monkeypatch):
    def broken(*_, **__):
        def refuse(*_):
            raise RuntimeError("no compiler\nat all")

        return refuse

    monkeypatch.setattr(torch, "compile", broken)


def test_a_network_that_cannot_be_compiled_is_trained_as_it_is_and_said(no_compiler):
    compiled = trained(recipe_of(**{"training.execution": "compiled"}), CPU, steps=3)
    assert fallbacks.drain() == {"compiled": "no compiler"}
    assert_alike(compiled, trained(recipe_of(), CPU, steps=3), 0)


def test_what_is_really_carried_out_is_in_the_log_and_in_the_metrics(no_compiler, tmp_path, tiny, capsys):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | {"training.execution": "compiled"})
    log = (run.folder / "train.log").read_text()
    assert "compiled steps" in log  # what was intended
    assert log.count("warning: the step is not compiled: no compiler; steps are eager") == 1
    assert capsys.readouterr().out.count("the step is not compiled") == 1
    told = [line for line in run.metrics() if "fallback" in line]
    assert told == [{"step": 1, "epoch": 0.3333, "fallback": {"compiled": "no compiler"}, "execution": "eager"}]
    assert [line["step"] for line in run.metrics() if "loss" in line] == list(range(1, 10))


def test_a_part_of_an_execution_that_fails_leaves_the_other():
    step = Step.__new__(Step)
    step.execution = "compiled and captured"
    step._give_up("captured", RuntimeError("a value\nwas asked for"))
    assert (step.execution, fallbacks.drain()) == ("compiled", {"captured": "a value"})
    step._give_up("compiled", RuntimeError())
    assert (step.execution, fallbacks.drain()) == ("eager", {"compiled": "RuntimeError"})


@needs_gpu
def test_a_step_that_cannot_be_captured_is_made_as_it_is_and_said(monkeypatch):
    original = TiCo.forward

    def asks(self, batch):
        output = original(self, batch)
        float(output.loss.detach())  # which makes the host wait
        return output

    monkeypatch.setattr(TiCo, "forward", asks)
    trained(recipe_of(**{"training.execution": "captured"}), GPU, steps=6)
    assert fallbacks.drain().keys() == {"captured"}


# --------------------------------------------------------------------------------------------- memory savers


class Plain(nn.Module):
    """A network without BatchNorm, whose parts are those of the whole."""

    width = 12

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 20), nn.GELU(), nn.Linear(20, self.width))

    def forward(self, images):
        return self.layers(images)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_give_the_gradient_and_the_covariance_of_the_whole_batch(parts, detach, symmetric):
    torch.manual_seed(0)
    config = Config(hidden=10, dim=6, detach=detach, symmetric=symmetric)
    method = TiCo(Plain(), config=config).double()
    method.projector[1] = nn.Identity()  # its BatchNorm
    method.target[1][1] = nn.Identity()
    method.criterion.covariance.copy_(torch.eye(6) / 6)
    other = copy.deepcopy(method)
    batch = Batch((torch.randn(16, 3, 6, 6).double(), torch.randn(16, 3, 6, 6).double()), torch.arange(16))

    whole = method(batch)
    whole.loss.backward()
    views = Views(recipe_of().views, 6, (0.0,) * 3, (1.0,) * 3, torch.float64)
    step = Step(other, torch.optim.SGD(other.parameters()), views, torch.float64, CPU, parts=parts)
    output = step._in_parts(batch)

    torch.testing.assert_close(output.loss, whole.loss)
    torch.testing.assert_close(other.criterion.covariance, method.criterion.covariance)
    for one, two in zip(method.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


class Dropping(Plain):
    """A network that drops activations at random."""

    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.4))
        self.drop_rate = 0.3

    def forward(self, images):
        return nn.functional.dropout(super().forward(images), self.drop_rate, self.training)


def test_parts_of_a_network_that_drops_have_the_gradient_of_what_they_embedded():
    torch.manual_seed(0)
    method = TiCo(Dropping(), config=Config(hidden=10, dim=6)).double()
    method.projector[1] = nn.Identity()
    method.target[1][1] = nn.Identity()
    other = copy.deepcopy(method)
    batch = Batch((torch.randn(16, 3, 6, 6).double(), torch.randn(16, 3, 6, 6).double()), torch.arange(16))

    torch.manual_seed(1)
    chunks = [tuple(view[8 * part :][:8] for view in batch.views) for part in range(2)]
    encoded = [method.encode(Batch(views, torch.arange(8))) for views in chunks]
    trained, fixed = (torch.cat([getattr(part, name)[0] for part in encoded]) for name in ("trained", "fixed"))
    method.loss(Encoded((trained,), (fixed,))).loss.backward()

    torch.manual_seed(1)
    views = Views(recipe_of().views, 6, (0.0,) * 3, (1.0,) * 3, torch.float64)
    Step(other, torch.optim.SGD(other.parameters()), views, torch.float64, CPU, parts=2)._in_parts(batch)
    for one, two in zip(method.parameters(), other.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("network", "execution", "kept"),
    [(Plain, "compiled", {"compiled"}), (Dropping, "captured", {"captured"}), (Plain, "eager", set())],
)
def test_parts_say_what_they_do_without(network, execution, kept, monkeypatch):
    monkeypatch.setattr(step_module, "resolve_execution", lambda execution, device: execution)
    fallbacks.drain()
    method = TiCo(network(), config=Config(hidden=10, dim=6))
    views = Views(recipe_of().views, 6, (0.0,) * 3, (1.0,) * 3, torch.float32)
    optimizer = torch.optim.SGD(method.parameters())
    step = Step(method, optimizer, views, torch.float32, CPU, execution=execution, parts=2)
    assert step.execution == "eager"
    assert fallbacks.drain().keys() == kept


def test_parts_with_batch_norm_count_each_part_once(tmp_path, tiny):
    whole, parts = (
        pretrain("demo", out=tmp_path / str(n), overrides=tiny | {"training.parts": n, "training.epochs": 1})
        for n in (1, 2)
    )
    one, two = (torch.load(run.checkpoint_file, "cpu", weights_only=True)["method"] for run in (whole, parts))
    assert int(two["backbone.network.bn1.num_batches_tracked"]) == 2 * int(
        one["backbone.network.bn1.num_batches_tracked"]
    )
    assert two["criterion.covariance"].trace() == pytest.approx(float(one["criterion.covariance"].trace()))


def test_parts_must_divide_the_batch():
    with pytest.raises(UserError, match=r"training\.parts 3 does not divide 16 images"):
        recipe_of(**{"training.parts": 3})


@pytest.mark.parametrize("name", ["tico/resnet10-w4", "torchvision/resnet18", "timm/vit_tiny_patch16_224"])
def test_forgetting_activations_changes_nothing(name):
    size = 32 if "vit" in name else 16
    changes = {"backbone.name": name, "data.image_size": size, "training.precision": "fp64"}
    kept = trained(recipe_of(**changes), CPU, steps=3)
    forgotten = trained(recipe_of(**changes, **{"training.recompute": True}), CPU, steps=3)
    assert_alike(forgotten, kept, 1e-12)


@pytest.mark.parametrize("name", ["timm/resnet18", "timm/vit_tiny_patch16_224"])
def test_what_is_recomputed_drops_the_same_paths_again(name):
    changes = {"backbone.name": name, "backbone.arguments": {"drop_path_rate": 0.5}, "training.precision": "fp64"}
    changes |= {"data.image_size": 32} if "vit" in name else {}
    states = []
    for recompute in (False, True):
        torch.manual_seed(3)
        states.append(trained(recipe_of(**changes, **{"training.recompute": recompute}), CPU, steps=2))
    assert_alike(*states, 1e-12)


def test_a_network_without_blocks_cannot_forget():
    with pytest.raises(UserError, match=r"training\.recompute needs"):
        recompute_blocks(Plain())


def test_kept_statistics():
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(8, 3))
    before = copy.deepcopy(norm.state_dict())
    with kept_statistics(norm):
        norm(torch.randn(8, 3) + 5)
    with pytest.raises(ZeroDivisionError), kept_statistics(norm):
        raise ZeroDivisionError
    assert norm.momentum == 0.1
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


# ------------------------------------------------------------------------------------------------- optimisers


def test_a_saved_optimiser_keeps_this_devices_form():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, recipe_of(**{"optimizer.name": "adamw"}).optimizer)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for group in state["param_groups"]:  # as a GPU would have saved it
        group |= {"lr": torch.tensor(0.5), "fused": True, "foreach": None, "capturable": True}
    fresh = build_optimizer(model, recipe_of(**{"optimizer.name": "adamw"}).optimizer)
    load_optimizer(fresh, state)
    assert all(isinstance(group["lr"], float) and group["foreach"] for group in fresh.param_groups)
    fresh.step()
