"""A training that meets NaN or infinity: noticed in loss and state, never saved, kept for replay, explained."""

import json
import math
import sys
from random import Random

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

from faults import FAULTS
from tico_ssl import pretrain
from tico_ssl.cli import main
from tico_ssl.methods._base import Encoded, Method, StepOutput
from tico_ssl.methods.tico import TiCo
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.training import pretrain as training
from tico_ssl.training import replay as replaying
from tico_ssl.training import start
from tico_ssl.training.batch_file import load_batch, save_batch
from tico_ssl.training.diagnosis import diagnose
from tico_ssl.training.finite import Watch, not_finite, state_of
from tico_ssl.training.setup import prepare
from tico_ssl.training.step import Step
from tico_ssl.training.stop import NotFinite, Stop, batch_file, read_stop, state_file

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
HOT = {"optimizer.name": "adamw", "optimizer.lr": 1e9, "optimizer.scale_lr": False, "optimizer.warmup_epochs": 0.0}


def test_what_is_not_finite_is_named():
    tensors = {
        "fine": torch.randn(3, 2),
        "nan": torch.tensor([1.0, NAN, 2.0]),
        "infinite": torch.tensor([[1.0, -INF]]),
        "bf16": torch.tensor(INF, dtype=torch.bfloat16),
        "large": torch.tensor([1e300, -1e300], dtype=torch.float64),  # no norm of it overflows
        "wide": torch.full((100,), 3e38),
        "empty": torch.zeros(0),
        "counter": torch.tensor(7),
    }
    assert not_finite(tensors) == ["nan", "infinite", "bf16"]
    assert not_finite({"counter": torch.tensor(7)}) == []


def test_weights_statistics_and_the_optimisers_memory_are_looked_at():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    watch, output = Watch(model, optimizer, 0), StepOutput(torch.tensor(1.0), {"a": torch.tensor(NAN)})
    assert watch.faults(5, output) == [] and watch.good == 5  # a term is no more than a line in a log
    assert {"0.weight", "1.running_var", "exp_avg_sq of 1.bias"} <= state_of(model, optimizer).keys()
    optimizer.state[model[1].bias]["exp_avg_sq"][1] = INF
    model[1].running_var[2] = INF
    assert watch.faults(6, output) == ["1.running_var", "exp_avg_sq of 1.bias"] and watch.good == 5
    output = StepOutput(torch.tensor(NAN), {"a": torch.tensor(NAN), "b": torch.tensor(0.0)}, torch.tensor([[INF]]))
    assert watch.faults(7, output)[:2] == ["the loss", "the embeddings"]
    assert watch.faults(7, output)[-1] == "the term 'a'"


# ---------------------------------------------------------------------------------------------------- the stop


def command(monkeypatch, capsys, *words):
    """Exit code, output and error output of a command."""
    monkeypatch.setattr(sys, "argv", ["tico", *(str(word) for word in words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    return stop.value.code or 0, said.out, said.err


def words_of(settings):
    return [f"{key}={value}" for key, value in settings.items()]


def test_infinite_variances_behind_a_finite_loss_end_a_run_with_its_own_exit_code(tmp_path, tiny, monkeypatch, capsys):
    settings = tiny | HOT | {"training.epochs": 1, "training.log_every_steps": 50, "data.limit": 64}
    folder = tmp_path / "run"
    code, out, err = command(monkeypatch, capsys, "pretrain", "demo", *words_of(settings), "--out", folder)
    assert code == 3
    assert err.startswith("error: stopped: after step 2 backbone.network.layer1.0.bn1.running_var, ")
    assert err.count("\n") == 1
    for words in ("before the first step all was", "no checkpoint was written yet", f"tico replay {folder}"):
        assert words in err
    assert "the forward pass of step 2 (running_var of backbone.network.layer1.0.bn1)" in err
    assert "the learning rate is too high" in err and "try: lower optimizer.lr" in err
    run = open_run(folder)
    assert not run.checkpoint_file.exists() and not run.backbone_file.exists()
    assert run.metrics() == []
    assert "running_var of backbone.network.layer1.0.bn1: inf" in (folder / "train.log").read_text()

    code, again, _ = command(monkeypatch, capsys, "replay", folder)
    assert code == 0
    assert again in out  # what the run said when it stopped
    assert "likely cause: values have grown to" in again


def test_an_optimiser_that_overflows_behind_finite_weights_is_noticed(tmp_path, tiny):
    tiny |= {"method.name": "simclr", "method.temperature": 1e-30}
    del tiny["method.hidden"], tiny["method.dim"]
    with pytest.raises(NotFinite, match=r"after step 1 exp_avg_sq of backbone.* in the optimiser of step 1 \(exp_avg"):
        pretrain("demo", out=tmp_path / "run", overrides=tiny)


def poison(monkeypatch, settings, step, what="the loss", value=INF):
    """Make the loss of one step, or a tensor of the state after it, not finite. Its batch tells which step it is, so it
    is the same when the step is carried out again."""
    index = prepare(start._loaded("demo", None, settings), CPU).loader.indices(step)
    forward, after_step, seen = TiCo.forward, TiCo.after_step, []

    def bad_forward(method, batch):
        output = forward(method, batch)
        seen[:] = [torch.equal(batch.index, index)]
        bad = seen[0] and what == "the loss"
        return StepOutput(output.loss * value, output.terms, output.embedding) if bad else output

    def bad_after_step(method, progress):
        made = after_step(method, progress)
        if seen[0] and what != "the loss":
            tensor = method.state_dict()[what]
            tensor[(0,) * tensor.ndim] = value
        return made

    monkeypatch.setattr(TiCo, "forward", bad_forward)
    monkeypatch.setattr(TiCo, "after_step", bad_after_step)


@pytest.fixture
def poisoned(tmp_path, tiny, monkeypatch):
    """Settings of a run whose fifth step is bad: in the second of three epochs of three steps. The next log step, and
    so the end, is the sixth."""
    settings = tiny | {"training.log_every_steps": 50}
    poison(monkeypatch, settings, 4)
    return settings


def test_the_batch_that_made_it_is_kept_with_its_views_and_the_state_before(tmp_path, poisoned, monkeypatch):
    with pytest.raises(NotFinite) as stop:
        pretrain("demo", out=tmp_path / "run", overrides=poisoned)
    for words in ("after step 6 ", "(after step 3 all was)", "the last good checkpoint is that of step 3"):
        assert words in str(stop.value)
    assert "in the loss of step 5 (loss)" in str(stop.value)
    run = open_run(tmp_path / "run")
    state = torch.load(run.checkpoint_file, weights_only=True)
    assert state["step"] == 3 and all(value.isfinite().all() for value in state["method"].values())
    assert [line["step"] for line in run.metrics()] == [3]

    setup = prepare(run.recipe(), CPU)
    expected = next(setup.loader.iterate(4, 5))
    kept, views = load_batch(batch_file(run), CPU), setup.views.make(expected.pixels, expected.decisions)
    for name in ("pixels", "decisions", "index", "label"):
        assert torch.equal(getattr(kept, name), getattr(expected, name))
    with safe_open(batch_file(run), "pt") as file:
        assert file.metadata() == {"step": "4"}
        assert all(torch.equal(file.get_tensor(f"view.{n:02}"), view) for n, view in enumerate(views))
    before = torch.load(state_file(run), weights_only=True)
    assert before["step"] == 4 == read_stop(run).step
    assert all(value.isfinite().all() for value in before["method"].values())

    monkeypatch.setattr(replaying, "prepare", None)  # the images are not needed any more
    assert any("in the loss of step 5" in line for line in start.replay(run.folder))


@pytest.mark.faults
def test_wherever_it_begins_it_is_found_and_never_saved(tmp_path, tiny, monkeypatch):
    """The loss or one tensor, at one step: the newest checkpoint is from before and finite, and the step is found.
    TICO_FAULTS times three trials."""
    random, trials = Random(0), 3 * FAULTS
    tiny |= {"training.checkpoint_seconds": 0.0}
    names = [name for name, value in fresh_state(tiny).items() if value.is_floating_point()]
    for trial in range(trials):
        step, what = random.randrange(9), random.choice(["the loss", *names])
        settings = tiny | {"training.log_every_steps": random.choice([1, 2, 50])}
        with monkeypatch.context() as patch:
            poison(patch, settings, step, what, random.choice([NAN, INF, -INF]))
            with pytest.raises(NotFinite):
                pretrain("demo", out=tmp_path / f"{trial}", overrides=settings)
        run = open_run(tmp_path / f"{trial}")
        assert read_stop(run).step == step, (step, what)
        assert run.checkpoint_file.exists() == (step >= 3)
        if step >= 3:
            state = torch.load(run.checkpoint_file, weights_only=True)
            assert state["step"] == step // 3 * 3
            assert not_finite(state["method"]) == []
        assert all(line["step"] <= step for line in run.metrics())
    print(f"\nvalues that are not finite: {trials} made, {trials} found, 0 saved")


def fresh_state(settings):
    return prepare(start._loaded("demo", None, settings), CPU).method.state_dict()


def test_a_search_that_would_take_long_is_left_to_replay(tmp_path, poisoned, monkeypatch):
    monkeypatch.setattr(start, "EXPLAIN_SECONDS", 0.0)
    with pytest.raises(NotFinite, match=r"steps 4 to 4 are finite; `tico replay .*run` also looks at the later ones"):
        pretrain("demo", out=tmp_path / "run", overrides=poisoned)
    run = open_run(tmp_path / "run")
    assert read_stop(run).step is None and not state_file(run).exists()
    with safe_open(batch_file(run), "pt") as file:
        assert file.metadata() == {"step": "5"}  # at which it was noticed
    assert start.replay(run.folder)[0] == "the first value that is not finite is in the loss of step 5:"
    assert read_stop(run).step == 4


def test_what_steps_do_not_make_again_is_no_matter_of_the_recipe(tmp_path, tiny, monkeypatch):
    steps, original = iter(range(100)), Step.__call__

    def fault(step, *arguments):
        if next(steps) == 4:
            next(step.method.parameters()).data.fill_(NAN)
        return original(step, *arguments)

    monkeypatch.setattr(Step, "__call__", fault)
    with pytest.raises(NotFinite, match=r"after step 5 .*steps 4 to 5, carried out again one by one, are all finite"):
        pretrain("demo", out=tmp_path / "run", overrides=tiny)
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny, resume=True)
    assert run.metrics()[-1]["step"] == 9
    with pytest.raises(UserError, match="nothing to replay: training has gone on to step 9"):
        start.replay(run.folder)


def test_nothing_hides_why_a_training_stopped(tmp_path, poisoned, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    def fails(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(training, "save_batch", full)
    monkeypatch.setattr(replaying, "explain", fails)
    with pytest.raises(NotFinite, match=r"after step 6 .*could not be saved \(.*No space left.*; lower optimizer\.lr"):
        pretrain("demo", out=tmp_path / "run", overrides=poisoned)


def test_a_request_to_stop_does_not_save_what_is_not_finite(tmp_path, tiny, monkeypatch):
    from tico_ssl.training.checkpoint import StopRequest

    monkeypatch.setattr(StopRequest, "agreed", lambda stop, at_log_step: True)
    monkeypatch.setattr(training.Watch, "faults", lambda watch, done, output: ["the loss"])
    with pytest.raises(NotFinite, match="after step 1 the loss is not finite"):
        pretrain("demo", out=tmp_path / "run", overrides=tiny | {"training.log_every_steps": 50})
    assert not open_run(tmp_path / "run").checkpoint_file.exists()


def test_a_damaged_record_is_one_line(run):
    record = run.folder / "nan" / "stop.json"
    record.parent.mkdir()
    whole = {"noticed": 3, "finite": 2, "saved": 0, "steps_per_epoch": 6, "not_finite": ["the loss"], "step": 2}
    damaged = [json.dumps(whole | change) for change in ({"noticed": "3"}, {"steps_per_epoch": 0}, {"x": 1})]
    for text in ("", "[]", "{}", "3", "\x00", "[" * 100_000, *damaged):
        record.write_text(text)
        with pytest.raises(UserError, match=r"stop\.json: damaged"):
            start.replay(run.folder)
    Stop(**whole).write(run)
    assert read_stop(run) == Stop(**whole)
    with pytest.raises(UserError, match="nothing to replay: training has gone on to step 6"):  # state.pt is not there
        start.replay(run.folder)


def test_a_batch_of_crops_that_share_memory_survives_the_disk(tmp_path):
    ring = torch.arange(2 * 12 * 3 * 4 * 4).remainder(256).to(torch.uint8).view(12, 2, 3, 4, 4)
    crops = tuple(ring[:, 0] for _ in range(12))
    raw = RawBatch(crops, torch.rand(12, 5), torch.arange(12))

    class Same:
        def make(self, pixels, decisions):
            return tuple(crop.float() for crop in pixels)

    save_batch(tmp_path / "batch.safetensors", 7, raw, Same())
    found = load_batch(tmp_path / "batch.safetensors", CPU)
    assert len(found.pixels) == 12 and found.label is None
    assert all(torch.equal(one, other) for one, other in zip(found.pixels, crops, strict=True))
    (tmp_path / "batch.safetensors").write_bytes(b"{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_batch(tmp_path / "batch.safetensors", CPU)


# ---------------------------------------------------------------------------------------------------- the diagnosis


class Toy(Method):
    """A method that goes wrong where it is told to."""

    def __init__(self, where):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)))
        self.where = where
        self.register_buffer("queue", torch.zeros(2))
        with torch.no_grad():
            self.backbone[1].weight.mul_(1e25 if where == "variance" else 1)
            self.backbone[1].bias.fill_(INF if where == "output" else 0)

    def encode(self, batch, fixed=True):
        return Encoded((self.backbone(batch.views[0]),))

    def loss(self, encoded):
        (z,) = encoded.trained
        loss = z.square().mean() * (1e3 if self.where == "update" else 1)
        if self.where == "loss":
            loss = loss + torch.zeros(()).log()
        if self.where == "overflow":
            loss = loss * INF  # and its gradients
        if self.where == "gradient":
            loss = loss + (z * 0).sum().sqrt()  # 0, of infinite slope
        return StepOutput(loss, {"square": loss.detach()}, z.detach())

    def after_step(self, progress):
        self.queue.fill_(NAN if self.where == "queue" else 0)
        return {}


class Pictures:
    """Views that are the pixels."""

    def make(self, pixels, decisions):
        return (pixels.float(),)


def diagnosed(where, lr=0.1, parts=1, recompute=False):
    method = Toy(where)
    if recompute:
        plain = method.backbone.forward
        method.backbone.forward = lambda images: checkpoint(plain, images, use_reentrant=False)
    optimizer = torch.optim.SGD(method.parameters(), lr=lr, momentum=0.9)
    raw = RawBatch(torch.randn(8, 3, 2, 2), torch.zeros(8, 1), torch.arange(8))
    if where == "views":
        raw.pixels[3, 0, 0, 0] = NAN
    step = Step(method, optimizer, Pictures(), torch.float32, CPU, parts=parts)
    return diagnose(step, raw, lr, 0.0)


@pytest.mark.parametrize(
    ("where", "lr", "stage", "name", "cause", "remedy"),
    [
        ("views", 0.1, "views", "view 0", "before a network sees them", "data.std"),
        ("output", 0.1, "forward pass", "the output of backbone.1", "root, norm or logarithm at 0", "fp32"),
        ("variance", 0.1, "forward pass", "running_var of backbone.2", "values have grown to", "lower optimizer.lr"),
        ("loss", 0.1, "loss", "square", "root, norm or logarithm at 0", "settings of the method"),
        ("gradient", 0.1, "backward pass", "the gradient at the output of backbone.3", "at 0", "fp32"),
        ("update", 1e38, "optimiser", "backbone.", "the learning rate makes the update overflow", "optimizer.lr"),
        ("queue", 0.1, "update after the optimiser", "queue", "target, queue or prototypes", "settings"),
    ],
)
def test_the_place_tells_the_cause(where, lr, stage, name, cause, remedy):
    found = diagnosed(where, lr)
    assert found.first.stage == stage and found.first.name.startswith(name)
    explanation = found.explained(4, lr)
    assert explanation.lines[0] == f"the first value that is not finite is in the {stage} of step 5:"
    assert cause in explanation.summary and remedy in explanation.lines[-1]
    assert any(line.startswith(f"  {name}") for line in explanation.lines)
    assert "\n" not in explanation.summary


@pytest.mark.parametrize("saving", [{"parts": 2}, {"recompute": True}])
@pytest.mark.parametrize(("where", "stage"), [("overflow", "loss"), ("gradient", "backward pass")])
def test_forward_passes_that_are_repeated_in_the_backward_pass_do_not_hide_the_place(saving, where, stage):
    assert diagnosed(where, **saving).first.stage == stage


def test_a_step_without_fault_is_said_to_be_finite():
    found = diagnosed("nowhere")
    assert found.first is None and list(found.terms) == ["square", "loss"]
    assert found.explained(4, 0.1).summary == "step 5, carried out once more, is finite from the views to the update"
    assert not any(json.dumps(line).count("\\n") for line in found.explained(4, 0.1).lines)
