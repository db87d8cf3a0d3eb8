"""The cost of methods beside each other: passes as their papers have them, state by hand, ratios of measured times."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tico_ssl.bench import Report, bench, methods
from tico_ssl.bench.methods import MethodCost, _arrangements, _described, counted_passes, extra_state_bytes
from tico_ssl.bench.table import print_report
from tico_ssl.cli import app
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.data.arrays import from_arrays
from tico_ssl.methods._base import Batch
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.setup import build_method

CPU = torch.device("cpu")


SMALL = {
    "data.image_size": 16,
    "backbone.name": "tico/resnet10-w4",
    "method.hidden": 16,
    "method.dim": 8,
    "training.batch_size": 8,
    "training.precision": "fp32",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    """One bench for all: tiny networks on a CPU, ceilings that take no time to measure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tico_ssl.bench.choose_device", lambda: CPU)
        patch.setattr("tico_ssl.bench.ceilings.COPIED", 2**16)
        patch.setattr("tico_ssl.bench.ceilings.CPU_SIDE", 64)
        out = tmp_path_factory.mktemp("bench") / "speed.json"
        made = bench("demo", overrides=SMALL, seconds=0.0, out=out, methods=True)
    assert out.read_text() == made.as_json()
    return made


def row(report: Report, method: str, views: str = "2 views") -> MethodCost:
    return next(cost for cost in report.methods if (cost.method, cost.views) == (method, views))


def test_every_method_is_there_and_tico_comes_first(report):
    assert {cost.method for cost in report.methods} == set(catalogue.entries("methods"))
    assert report.methods[0].method == "tico"
    assert report.methods_left_out == {}
    for cost in report.methods:
        assert cost.execution == "eager"
        assert cost.step_seconds > 0
        assert cost.images_per_second == pytest.approx(8 / cost.step_seconds)
        assert cost.relative_seconds == pytest.approx(cost.step_seconds / report.methods[0].step_seconds)
        assert math.isfinite(cost.loss)
        assert (cost.peak_bytes, cost.relative_peak) == (None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_captured_and_memory_is_compared(report):
    there = bench("demo", overrides=SMALL, seconds=0.0, methods=True)
    assert there.methods_left_out == there.fallbacks == {}
    first = there.methods[0]
    for cost, here in zip(there.methods, report.methods, strict=True):
        assert (cost.method, cost.views, cost.execution) == (here.method, here.views, "captured")
        assert (cost.forwards, cost.backwards, cost.state_bytes) == (here.forwards, here.backwards, here.state_bytes)
        assert cost.peak_bytes > cost.state_bytes
        assert cost.relative_peak == pytest.approx(cost.peak_bytes / first.peak_bytes)


def test_passes_through_the_backbone_are_counted(report):
    """Forward with the online and the target network, and back: one direction, two, all crops, an image and pieces."""
    expected = {
        ("tico", "2 views"): (2, 1),
        ("squared-contrastive", "2 views"): (2, 1),
        ("moco", "2 views"): (2, 1),
        ("byol", "2 views"): (4, 2),
        ("simclr", "2 views"): (2, 2),
        ("simsiam", "2 views"): (2, 2),
        ("barlow-twins", "2 views"): (2, 2),
        ("vicreg", "2 views"): (2, 2),
        ("swav", "2 views"): (2, 2),
        ("swav", "2 + 6 views"): (8, 8),
        ("pirl", "view + jigsaw"): (10, 10),
        ("supervised", "1 view"): (1, 1),
    }
    assert {(cost.method, cost.views): (cost.forwards, cost.backwards) for cost in report.methods} == expected
    assert row(report, "byol").forward_pixels == 4
    assert row(report, "swav", "2 + 6 views").forward_pixels == 2 + 6 * (7 / 16) ** 2  # 16 pixels and 0.4286 of them
    assert row(report, "pirl", "view + jigsaw").forward_pixels == 1 + 9 * (5 / 16) ** 2  # pieces of cells of 6


def test_a_symmetric_step_is_counted_as_it_is_made(tiny):
    recipe = load_recipe("demo", tiny | {"method.symmetric": True})
    method = build_method(recipe, CPU, torch.float32)
    views = tuple(torch.randn(4, 3, 16, 16) for _ in range(2))
    with counted_passes(method) as passes:
        method(Batch(views, torch.arange(4))).loss.backward()
    assert (passes.forwards, passes.backwards, passes.pixels) == (16, 8, 16 * 16 * 16)
    method(Batch(views, torch.arange(4)))
    assert passes.forwards == 16  # hooks are taken off again


def test_state_is_all_but_what_is_trained(report, tiny):
    """Target, covariance, queue, bank and running statistics, by hand from the sizes of tensors."""
    for name in ("tico", "simclr", "moco", "byol"):
        method = build_method(
            load_recipe("demo", tiny | {"method": {"name": name, "hidden": 16, "dim": 8}}), CPU, torch.float32
        )
        state = method.state_dict(keep_vars=True)
        kept = {key: value for key, value in state.items() if not value.requires_grad}
        assert extra_state_bytes(method) == sum(value.numel() * value.element_size() for value in kept.values())
        assert row(report, name).state_bytes == extra_state_bytes(method)
    statistics = row(report, "simclr").state_bytes
    network = sum(p.numel() for p in build_method(load_recipe("demo", tiny), CPU, torch.float32).target.parameters())
    assert 4 * network < row(report, "tico").state_bytes < 4 * network + 2 * statistics + 4 * 8 * 8 + 64
    assert row(report, "moco").state_bytes > 4 * 65536 * 8
    # SimCLR's projector has two BatchNorms of its own, the last with a bias that stays zero.
    backbone = statistics - 8 * (2 * 16 + 2 * 8) // 2 - 2 * 8 - 4 * 8
    memories = 1024 * (4 * 8 + 1) + 4  # an entry for each of 1024 images, whether it was written to, and a constant
    assert row(report, "pirl", "view + jigsaw").state_bytes == memories + backbone


def test_views_are_the_recipes_where_they_are_laid_out_alike():
    given = load_recipe("demo").views
    assert _arrangements("byol", given) == [given]
    assert _arrangements("supervised", given) == [given[:1]]
    two, eight = _arrangements("swav", given)
    assert two == given
    assert _described(eight) == "2 + 6 views"
    many = load_recipe("imagenet/swav").views
    assert [view.crop_scale for view in _arrangements("tico", many)[0]] == [many[0].crop_scale] * 2
    (jigsaw,) = _arrangements("pirl", given)
    assert _described(jigsaw) == "view + jigsaw"
    for name in packaged_recipes():
        recipe = load_recipe(name)
        views = _described(recipe.views)
        assert views in [_described(found) for found in _arrangements(recipe.method.name, recipe.views)]


def test_what_cannot_be_measured_says_why(report, monkeypatch):
    def refuse(subject, *_):
        name = subject.recipe.method.name
        if name == "byol":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "moco":
            raise UserError("a queue of 65536 keys is not a multiple of the 24 that a step adds to it")
        return row(report, "tico")

    monkeypatch.setattr(methods, "_time_method", refuse)
    images = from_arrays("black", torch.zeros(64, 3, 16, 16, dtype=torch.uint8), None)
    pretended = lambda recipe: SimpleNamespace(recipe=recipe, source=images)  # noqa: E731
    monkeypatch.setattr(methods, "_subject_of", lambda subject, recipe: pretended(recipe))

    costs, left_out = methods.time_methods(pretended(load_recipe("demo")), 0.0)
    assert len(costs) == 10
    assert left_out["byol, 2 views"] == "does not fit in GPU memory"
    assert "not a multiple" in left_out["moco, 2 views"]


def test_the_table_fits_a_terminal_and_names_all(report, capsys):
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("every method, eager steps with views") :]
    for cost in report.methods:
        name = cost.method if cost.views == "2 views" else f"{cost.method}, {cost.views}"
        (found,) = [line.split() for line in table if f"{line} ".startswith(f" {name}  ")]
        *_, relative, rate, forwards, plus, backwards, state = found
        assert (relative, rate) == (f"{cost.relative_seconds:.2f}", f"{cost.images_per_second:,.0f}")
        assert (forwards, plus, backwards) == (f"{cost.forwards:g}", "+", f"{cost.backwards:g}")
        assert state == f"{cost.state_bytes / 1e6:,.2f}"
    assert max(map(len, table)) <= 80
    assert "…" not in "".join(lines)


def test_the_option(report, monkeypatch):
    asked = []

    def pretended(*arguments):
        asked.append(arguments[-1])
        return report

    monkeypatch.setattr("tico_ssl.bench.bench", pretended)
    for words in (["bench", "--methods"], ["bench"]):
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert asked == [True, False]
    assert json.loads(report.as_json())["methods"][0]["method"] == "tico"


def test_steps_in_several_forms_are_timed_in_turn(monkeypatch):
    """What the scripts in benchmarks/ print; a form that cannot be built is a line that says why."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    steps = importlib.import_module("steps")

    build = steps._warm

    def refuse(subject, form):
        if form == steps.Form():
            raise RuntimeError("no such kernel\nin this build")
        return build(subject, form)

    monkeypatch.setattr(steps, "_warm", refuse)
    changes = {"data.image_size": 16, "backbone.name": "tico/resnet10-w4", "training.batch_size": 4}
    recipe = load_recipe("cifar10/byol", changes | {"method.hidden": 8, "method.dim": 4})
    forms = {"one": steps.Form(overlap=False), "none": steps.Form(), "other": steps.Form(fused=False)}
    lines = list(steps.timed(recipe, forms, seconds=0))
    assert lines[0] == {"form": "none", "error": "no such kernel"}
    assert [line["form"] for line in lines[1:]] == ["one", "other"]
    for line in lines[1:]:
        low, high = line["quartiles"]
        assert 0 < low <= line["milliseconds"] <= high
        assert line["images_per_second"] == pytest.approx(4000 / line["milliseconds"], abs=1)
