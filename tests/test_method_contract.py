"""What every method promises, asked of all that the catalogue finds, in every packaged recipe for it.

No method is named here: one more file in `methods/` and a recipe for it are in these tests from then on. Recipes are
made small by one rule, that no count among a method's settings is above LARGEST.
"""

import copy
import json
import math
import os
import sys
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from test_distributed import Tiny, in_two_processes
from test_pretrain import assert_same, interrupt_after, state_of, without_clock
from test_target_methods import Watched
from tico_ssl import pretrain, study
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.data.formats.textures import CLASSES, draw_textures
from tico_ssl.methods._base import Batch, Method
from tico_ssl.methods._queue import KeyQueue, mean_cosine
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.target import overlapping
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.report import report
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.training.monitor import measure
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import Step, resolve_execution
from tico_ssl.views.executor import Views

LARGEST = 32
IMAGES, BATCH, SIZE = 32, 8, 16
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

RESNET = {"backbone.name": "tico/resnet10-w4", "backbone.arguments": {}}
TRANSFORMER = {
    "backbone.name": "timm/vit_tiny_patch16_224",
    "backbone.arguments": {
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "dynamic_img_size": True,  # crops of several sizes, and pieces that patches do not fill
        "dynamic_img_pad": True,
    },
}


def small(name, **changes):
    """Overrides that make a packaged recipe a matter of a second."""
    method = load_recipe(name).method
    counts = {key: value for key, value in method if type(value) is int}
    short = {
        f"method.{key}": min(value, 2 if key.endswith(("_steps", "_splits")) else LARGEST)
        for key, value in counts.items()
    }
    return short | {
        "data.source": "textures",
        "data.image_size": SIZE,
        "data.limit": IMAGES,
        "backbone.weight_standardisation": False,
        **RESNET,
        "optimizer.warmup_epochs": 0.0,
        "training.batch_size": BATCH,
        "training.epochs": 2,
        "training.precision": "fp32",
        "training.log_every_steps": 1,
        "training.knn_every_epochs": 0,
        **changes,
    }


def keeps_every_image(method):
    return "images" in catalogue.load("methods", method).Config.model_fields


def recipe_of(name, **changes):
    return load_recipe(name, small(name, **changes))


def distinct(recipes):
    """Those that differ in more than numbers: other parts of a method, another layout of views."""
    found = {}
    for name, recipe in recipes.items():
        parts = [value for _, value in recipe.method if type(value) is not float]
        views = [(view.count, view.relative_size, view.jigsaw) for view in recipe.views]
        found.setdefault(repr((parts, views)), name)
    return list(found.values())


METHODS = catalogue.entries("methods")
RECIPES = {name: recipe_of(name) for name in packaged_recipes()}
FORMS = distinct(RECIPES)
FIRST = {method: next((name for name in FORMS if RECIPES[name].method.name == method), "") for method in METHODS}
every_method = pytest.mark.parametrize("method", METHODS)
every_recipe = pytest.mark.parametrize("name", RECIPES)
every_form = pytest.mark.parametrize("name", FORMS)


def views_of(recipe, dtype=torch.float32):
    return Views(recipe.views, recipe.data.image_size, recipe.data.mean, recipe.data.std, dtype)


def raw_batch(views, number=0, device=CPU):
    """Textures, and what is to be done to them, as a loader would hand them over."""
    images, labels = draw_textures(BATCH, SIZE, seed=number)
    generator = torch.Generator().manual_seed(number)
    decisions = views.decide(views.draw(BATCH, generator), torch.full((BATCH, 2), float(SIZE)))
    index = torch.randperm(IMAGES, generator=generator)[:BATCH]
    return RawBatch(*(one.to(device) for one in (images, decisions, index, labels)))


def batch_of(recipe, number=0, dtype=torch.float32):
    views = views_of(recipe, dtype)
    raw = raw_batch(views, number)
    return Batch(views.make(raw.pixels, raw.decisions), raw.index, raw.label)


def stepped(method, optimizer, batch, progress):
    torch.manual_seed(5)  # as training seeds every step
    output = method(batch)
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    method.after_step(progress)
    return output


# ------------------------------------------------------------------------------------------------ what it consists of


@every_method
def test_a_method_has_a_recipe_and_a_line_in_listings(method):
    module = catalogue.load("methods", method)
    assert FIRST[method]
    assert module.Config.model_fields["name"].default == method
    assert len(catalogue.summary("methods", method)) > 20
    assert all(field.description for field in module.Config.model_fields.values())


@every_recipe
def test_it_keeps_the_contract_in_every_recipe(name):
    recipe = recipe_of(name)
    method = build_method(recipe, CPU, torch.float32)
    method.check_data(IMAGES, torch.arange(IMAGES) % len(CLASSES))
    assert isinstance(method, Method)
    output = method(batch_of(recipe))
    assert output.loss.ndim == 0
    assert math.isfinite(output.loss.item())
    assert output.embedding.shape[0] == BATCH
    assert not output.embedding.requires_grad
    assert all(term.ndim == 0 and term.isfinite() for term in output.terms.values())
    output.loss.backward()
    for key, parameter in method.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, key
    logged = method.after_step(0.5) | method.diagnostics()
    assert all(math.isfinite(float(value)) for value in logged.values())
    collapsed = method.collapsed_loss()
    assert collapsed is None or math.isfinite(collapsed)


@every_recipe
def test_what_is_logged_of_a_step_keeps_every_term_of_its_loss(name):
    """The monitor adds values of its own, under names that no method has."""
    recipe = recipe_of(name)
    method = build_method(recipe, CPU, torch.float32)
    output = replace(method(batch_of(recipe)), embedding=torch.randn(32, 16))  # enough for all that is measured of it
    logged = measure(output, method, {"lr": 0.1})
    assert "embedding_rank" in logged
    for key, value in {"loss": output.loss, **output.terms}.items():
        assert logged[key] == value.item(), key


@every_method
@pytest.mark.parametrize("backbone", [RESNET, TRANSFORMER], ids=["resnet", "transformer"])
def test_steps_lower_the_loss_of_fixed_images(method, backbone):
    """Each step alone: target, queue, bank and prototypes' count are put back before the loss is asked for again."""
    recipe = recipe_of(FIRST[method], **backbone)
    module, batch = build_method(recipe, CPU, torch.float64).double(), batch_of(recipe, dtype=torch.float64)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for number in range(4):
        before = copy.deepcopy(module.state_dict())
        torch.manual_seed(5)
        loss = module(batch).loss
        gradients = torch.autograd.grad(loss, trained)
        length = torch.stack([gradient.norm() for gradient in gradients]).norm()
        module.load_state_dict(before)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= 1e-4 * gradient / length  # short, for a decrease by first order
        after = {key: before[key] for key, _ in module.named_buffers()}
        torch.manual_seed(5)
        assert module(batch).loss.item() < loss.item(), number
        module.load_state_dict(module.state_dict() | after)
        stepped(module, torch.optim.SGD(trained, lr=0.0), batch, number / 4)  # all that follows a step moves on


# --------------------------------------------------------------------------------------------------- recorded steps


def plain_values(module):
    """All that a module remembers outside of tensors."""
    kept = bool | int | float | str | types.NoneType | tuple
    return {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, kept)
    }


@every_form
def test_a_step_asks_the_device_for_no_value_and_remembers_in_tensors_alone(name):
    """A recorded step is replayed without Python: what Python would look at or count in it stands still."""
    recipe = recipe_of(name)
    method, progress = build_method(recipe, CPU, torch.float32), torch.tensor(0.5)
    optimizer = build_optimizer(method, recipe.optimizer, 1e-3, method.fixed_rate())
    stepped(method, optimizer, batch_of(recipe), progress)  # like the steps before one is recorded
    before, batch = plain_values(method), batch_of(recipe, 1)
    with Watched() as watched:
        output = method(batch)
        output.loss.backward()
        method.after_step(progress)
    assert watched.asked == []
    assert plain_values(method) == before


def made_steps(recipe, device, steps=10, overlap=True, dtype=torch.float32):
    """The losses of some steps on a device, and the state that they end in."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    method = build_method(recipe, device, dtype)
    optimizer, views = build_optimizer(method, recipe.optimizer, 1e-3, method.fixed_rate()), views_of(recipe, dtype)
    execution = recipe.training.execution
    step = Step(method, optimizer, views, dtype, device, execution=execution, overlap=overlap)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        outcome = step(raw_batch(views, number, device), 1e-4 * (1 + number), number / steps)
        losses.append(float(outcome.output.loss.detach()))
    assert step.execution == resolve_execution(execution, device)
    return losses, {key: value.cpu() for key, value in method.state_dict().items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_recipe
def test_captured_steps_are_the_eager_ones(name):
    """Ten steps, seven of them replayed: the same in float64. In float32 the fused operations add in other orders, and
    every step carries that on, so that is shown for the first replay alone."""
    for dtype, steps, tolerance in ((torch.float64, 10, 1e-6), (torch.float32, 4, 2e-3)):
        (losses, state), (expected, wanted) = (
            made_steps(recipe_of(name, **{"training.execution": execution}), GPU, steps, dtype=dtype)
            for execution in ("captured", "eager")
        )
        assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
        for key, value in wanted.items():
            about = {"rtol": 2 * tolerance, "atol": 2 * tolerance, "msg": lambda m, k=key: f"{k}: {m}"}
            torch.testing.assert_close(state[key], value, **about)


WITH_TARGET = [name for name in FORMS if "ema_start" in type(RECIPES[name].method).model_fields]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", WITH_TARGET)
def test_networks_side_by_side_are_those_one_after_the_other(name):
    """The same kernels on two streams or one: what differs is the order of sums that run atomically."""
    recipe = recipe_of(name, **{"training.execution": "captured"})
    alone, beside = (made_steps(recipe, GPU, overlap=overlap) for overlap in (False, True))
    assert beside[0] == pytest.approx(alone[0], rel=1e-3, abs=1e-3)
    for key, value in alone[1].items():
        torch.testing.assert_close(beside[1][key], value, rtol=2e-3, atol=2e-3, msg=lambda m, k=key: f"{k}: {m}")


class Stream:
    """Stands for a CUDA stream, and writes down what it waits for and what is done on it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    """The main and a second stream, and their log."""
    log = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextmanager
    def stream(chosen):
        current.append(chosen)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return side, log


@pytest.mark.parametrize("name", WITH_TARGET)
def test_every_target_runs_beside_the_online_network(name, streams):
    """Speeds are compared under equal conditions: no method alone has a second stream. Before and after, streams wait
    for each other; without a second one the result is the same."""
    recipe, (side, log) = recipe_of(name), streams
    method, batch = build_method(recipe, CPU, torch.float32), batch_of(recipe)
    expected = copy.deepcopy(method)(batch).loss
    for network, called in ((method.backbone, "online"), (method.target[0], "target")):
        network.register_forward_pre_hook(
            lambda *_, called=called: log.append(f"{called} on {torch.cuda.current_stream().name}")
        )
    with overlapping(method, side):
        loss = method(batch).loss
    assert log[0] == "side waits for main"
    assert log[-1] == "main waits for side"
    assert set(log[1:-1]) == {"target on side", "online on main"}
    assert torch.equal(loss, expected)
    log.clear()
    method(batch)
    assert set(log) == {"target on main", "online on main"}


@pytest.mark.parametrize("fails", ["backbone", "target.0"])
def test_streams_meet_again_where_a_network_fails(fails, streams):
    recipe, (side, log) = recipe_of(WITH_TARGET[0]), streams
    method = build_method(recipe, CPU, torch.float32)

    def fail(*_):
        raise RuntimeError("no memory")

    method.get_submodule(fails).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"), overlapping(method, side):
        method(batch_of(recipe))
    assert log[-1] == "main waits for side"
    assert method.target.stream is None


# ------------------------------------------------------------------------------------------------------- whole runs


@every_form
def test_a_run_ends_well_and_an_interrupted_one_ends_the_same_to_the_bit(name, tmp_path, monkeypatch):
    whole = pretrain(name, out=tmp_path / "whole", overrides=small(name))
    lines = whole.metrics()
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["embedding_std"] > 0.01 for line in lines)

    interrupt_after(monkeypatch, 3)
    with pytest.raises(Interrupted, match="stopped after step 3 of 8"):
        pretrain(name, out=tmp_path / "parts", overrides=small(name))
    monkeypatch.undo()
    parts = pretrain(name, out=tmp_path / "parts", overrides=small(name), resume=True)
    one, other = state_of(whole), state_of(parts)
    one.pop("seconds"), other.pop("seconds")
    assert_same(one, other)
    assert without_clock(lines) == without_clock(parts.metrics())


@every_method
def test_a_longer_run_keeps_images_apart(method, tmp_path):
    """64 steps of a network of a few channels do not teach it much, but neither do they end in one point for all."""
    changes = {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "optimizer.scale_lr": False}
    changes |= {"data.limit": 128, "training.batch_size": 16, "training.epochs": 8, "backbone.zero_gamma": False}
    changes |= {"method.images": 128} if keeps_every_image(method) else {}
    lines = pretrain(FIRST[method], out=tmp_path / "run", overrides=small(FIRST[method], **changes)).metrics()
    assert len(lines) == 64
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["mean_cosine"] < 0.95 for line in lines)
    # Of unit vectors, variances and the squared mean add up to one: the deviations cannot have gone either.
    assert lines[-1]["embedding_std"] > 0.1 / math.sqrt(LARGEST)


@every_method
def test_images_that_do_not_suit_are_refused_before_the_first_step(method, tmp_path):
    """A method that keeps something for every image says so at once; to others a few more make no difference."""
    name = FIRST[method]
    changes = small(name, **{"data.limit": 5 * BATCH, "training.epochs": 1})
    if not keeps_every_image(method):
        assert len(pretrain(name, out=tmp_path / "run", overrides=changes).metrics()) == 5
        return
    with pytest.raises(
        UserError, match=rf"has {LARGEST} entries for {5 * BATCH} images: set method\.images={5 * BATCH}"
    ):
        pretrain(name, out=tmp_path / "run", overrides=changes)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- two processes


def descended(method, batch, steps=2):
    """A few steps of plain gradient descent; all that two processes and one must agree in."""
    history = []
    trained = {key: parameter for key, parameter in method.named_parameters() if parameter.requires_grad}
    for number in range(steps):
        optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
        torch.manual_seed(5)  # the same draws in all processes
        output = method(batch)
        optimizer.zero_grad()
        output.loss.backward()
        distributed.average_gradients(trained.values())
        optimizer.step()
        method.after_step(number / steps)
        history.append(distributed.all_mean(output.loss.detach()))
    gradients = {key: parameter.grad for key, parameter in trained.items()}
    return {"loss": torch.stack(history), "gradient": gradients, "state": method.state_dict()}


def exact(name):
    torch.manual_seed(0)
    config = RECIPES[name].method
    return catalogue.load("methods", config.name).build(config, Tiny()).double().train()


def share(rank):
    results, half = {}, slice(BATCH // 2 * rank, BATCH // 2 * (rank + 1))
    for name in FORMS:
        whole = batch_of(RECIPES[name], dtype=torch.float64)
        batch = Batch(tuple(view[half] for view in whole.views), whole.index[half], whole.label[half])
        results[name] = descended(share_statistics(exact(name)), batch)
    return results


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_are_one_with_the_global_batch(tmp_path):
    """In float64 and in every form: loss, gradients, weights, target, queue, bank, prototypes, statistics."""
    both = in_two_processes(share, tmp_path)
    for name in FORMS:
        alone = descended(exact(name), batch_of(RECIPES[name], dtype=torch.float64))
        for together in both:
            torch.testing.assert_close(together[name]["loss"], alone["loss"], rtol=1e-9, atol=1e-11, msg=name)
            for kind in ("gradient", "state"):
                assert together[name][kind].keys() == alone[kind].keys()
                for key, value in alone[kind].items():
                    message = f"{name}: {key}"
                    torch.testing.assert_close(together[name][kind][key], value, rtol=1e-6, atol=1e-9, msg=message)


# ------------------------------------------------------------------------------------------------------ diagnostics


def test_mean_cosine_is_that_of_all_pairs_that_are_counted():
    vectors = nn.functional.normalize(torch.randn(7, 4, dtype=torch.float64), dim=1)
    counted = torch.tensor([True, False, True, True, False, True, False])
    chosen = [row for row, yes in zip(vectors, counted, strict=True) if yes]
    pairs = [float(a @ b) for i, a in enumerate(chosen) for j, b in enumerate(chosen) if i != j]
    assert float(mean_cosine(vectors, counted)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert float(mean_cosine(vectors[:1].expand(7, 4), counted)) == pytest.approx(1, abs=1e-12)
    for few in (0, 1):
        assert float(mean_cosine(vectors, torch.arange(7) < few)) == pytest.approx(0, abs=1e-12)


def test_a_queue_tells_its_fill_its_age_and_whether_its_keys_are_alike():
    queue = KeyQueue(nn.functional.normalize(torch.randn(12, 3), dim=1))
    key = nn.functional.normalize(torch.ones(1, 3), dim=1)
    expected = [(4 / 12, 1), (8 / 12, 2), (1, 3), (1, 3)]
    for filled, age in expected:
        queue.enqueue(key.expand(4, 3))
        found = queue.diagnostics("queue")
        assert list(found) == ["queue_filled", "queue_age", "queue_cosine"]
        assert [float(value) for value in found.values()] == pytest.approx([filled, age, 1.0], abs=1e-5)


# ------------------------------------------------------------------------------------------------------- one more


def test_the_method_of_the_documentation_is_one_file(tmp_path, monkeypatch):
    """docs/extending/method.md shows a whole method: under its dotted name it trains, takes part in a study, is
    evaluated and reported, and asks the device for nothing."""
    page = Path(__file__).parents[1] / "docs" / "extending" / "method.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "alignment.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # a study's runs are processes of their own
    changes = small("demo") | {"method": {"name": "my_lab.alignment", "hidden": 16, "dim": 8}}
    changes = {key: value for key, value in changes.items() if not key.startswith("method.")}
    run = pretrain("demo", out=tmp_path / "run", overrides=changes)
    assert all(line["uniformity"] < 0 <= line["alignment"] for line in run.metrics())
    recipe = load_recipe("demo", changes)
    method, batch = build_method(recipe, CPU, torch.float32), batch_of(recipe)
    with Watched() as watched:
        method(batch).loss.backward()
    assert watched.asked == []
    assert method.embed(batch.views[0]).shape == (BATCH, 8)

    plan = {"base": "demo", "overrides": changes, "protocols": ["knn", "rankme"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    summary = study(tmp_path / "mine.yaml", out=tmp_path / "study", side_by_side=1)
    assert summary.failures == {}
    lines = (tmp_path / "study" / "base-seed0" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["protocol"] for line in lines} == {"knn", "rankme"}
    for place in (tmp_path / "run", tmp_path / "study"):
        assert "my_lab.alignment" in report(place, points=0).read_text(encoding="utf-8")


def test_what_a_file_builds_must_be_a_method(tmp_path, monkeypatch):
    """A module that is not one is refused in one line, before anything is written."""
    lines = ["from torch import nn", "from tico_ssl.methods import MethodConfig", "class Config(MethodConfig):"]
    lines += ["    name: str = 'other_lab.nothing'", "def build(config, backbone):", "    return nn.Identity()"]
    (tmp_path / "other_lab").mkdir()
    (tmp_path / "other_lab" / "nothing.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    changes = {key: value for key, value in small("demo").items() if not key.startswith("method.")}
    with pytest.raises(UserError, match=r"^method 'other_lab\.nothing': .*tico_ssl\.methods\.Method$"):
        pretrain("demo", out=tmp_path / "run", overrides=changes | {"method": {"name": "other_lab.nothing"}})
    assert not (tmp_path / "run").exists()


def test_the_documentation_names_every_method_and_recipe():
    text = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    table = text.split("## Where a method departs")[0]
    assert [name for name in (*METHODS, *packaged_recipes()) if f"`{name}`" not in table] == []
