"""The bench: its counts by hand and by torch's own counter, its measurements finite, its words and exit codes."""

import dataclasses
import json
import math
import statistics
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from tico_ssl.bench import Report, _executions, bench, random_images, rivals
from tico_ssl.bench.ceilings import Ceilings, measure_ceilings
from tico_ssl.bench.feeding import Feeding
from tico_ssl.bench.roofline import Operation, operations_of, roofline, step_operations
from tico_ssl.bench.stages import Speed
from tico_ssl.bench.table import print_report
from tico_ssl.bench.timing import time_calls, time_in_turn
from tico_ssl.cli import app, main
from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.methods._base import Batch
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.setup import build_method

CPU = torch.device("cpu")
QUICK = 0.01


@pytest.fixture
def small(tiny, monkeypatch):
    """Overrides, and ceilings that take no time to measure."""
    monkeypatch.setattr("tico_ssl.bench.ceilings.COPIED", 2**16)
    monkeypatch.setattr("tico_ssl.bench.ceilings.CPU_SIDE", 64)
    return {key: value for key, value in tiny.items() if key != "data.limit"}


@pytest.fixture
def report(small) -> Report:
    return bench("demo", overrides=small, seconds=QUICK)


def gflop(operations: list[Operation], phase: str = "") -> float:
    return sum(operation.flops for operation in operations if operation.phase.startswith(phase)) / 1e9


# Counts


def test_a_tiny_network_counted_by_hand():
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),  # 4 x 4 pixels: 32 values in, 64 out, 72 weights
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),  # 64 to 16
        nn.Flatten(),
        nn.Linear(16, 5),  # 80 weights
    )
    found = operations_of(network, torch.zeros(2, 2, 4, 4), images=2, batch=8)
    convolution = (2.0 * 64 * 18, 32 + 64 + 72 / 8)
    linear = (2.0 * 5 * 16, 16 + 5 + 80 / 8)
    assert [(o.layer, o.phase, o.flops, o.values) for o in found] == [
        ("0", "forward", *convolution),
        ("0", "backward", *convolution),  # of the weights alone: images take no gradient
        ("1", "forward", 0, 3 * 64),
        ("1", "backward", 0, 5 * 64),
        ("3", "forward", 0, 64 + 16),
        ("3", "backward", 0, 64 + 16),
        ("5", "forward", *linear),
        ("5", "backward", *linear),
        ("5", "backward", *linear),
    ]


def test_without_gradient_only_the_forward_pass_counts():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=2))
    with torch.no_grad():
        found = operations_of(network, torch.zeros(2, 3, 4, 4), images=2, batch=2)
    assert [o.phase for o in found] == ["forward"] * 3
    assert found[-1].flops == 2 * (4 * 2 * 2) * (2 * 3 * 3)  # each output channel sees its group alone
    frozen = network.requires_grad_(False)
    assert [o.phase for o in operations_of(frozen, torch.zeros(2, 3, 4, 4), 2, 2)] == ["forward"] * 3


def test_hooks_are_taken_off_again():
    network = nn.Linear(2, 2)
    operations_of(network, torch.zeros(2, 2), 2, 2)
    assert not network._forward_hooks


def test_an_operation_takes_the_longer_of_arithmetic_and_memory():
    operations = [Operation("a", "forward", flops=100, values=1), Operation("b", "backward", flops=1, values=100)]
    roof = roofline(operations, Ceilings(flops_per_second=10, bytes_per_second=40), width=2)
    assert roof.images_per_second == pytest.approx(1 / (100 / 10 + 200 / 40))
    assert roof.limited_by_memory == pytest.approx(5 / 15)
    assert (roof.gflop, roof.forward_gflop, roof.megabytes) == pytest.approx((101e-9, 100e-9, 202e-6))


@pytest.mark.parametrize(
    "name, size, expected", [("torchvision/resnet18", 32, 1.111), ("torchvision/resnet50", 224, 8.174)]
)
def test_forward_arithmetic_of_known_networks(name, size, expected):
    backbone = build_backbone(BackboneConfig(name=name), size)
    with torch.no_grad():
        found = operations_of(backbone, torch.zeros(2, 3, size, size), images=2, batch=2)
    assert gflop(found) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("recipe, hidden, expected", [("cifar10/tico", 4096, 4.47), ("imagenet/tico", 4096, 32.5)])
def test_arithmetic_of_a_step_of_tico(recipe, hidden, expected):
    found = step_operations(load_recipe(recipe, {"method.hidden": hidden}))
    assert gflop(found) == pytest.approx(expected, rel=0.02)
    # Two networks forward, two gradients of each layer but the first, whose input takes none.
    assert gflop(found, "forward") == pytest.approx(gflop(found, "backward") + found[0].flops / 1e9)


@pytest.mark.parametrize("symmetric", [False, True])
def test_arithmetic_as_torch_counts_it(tiny, symmetric):
    recipe = load_recipe("demo", tiny | {"method.symmetric": symmetric, "backbone.name": "tico/resnet10-w16"})
    method = build_method(recipe, CPU, torch.float32)
    images = 8
    with FlopCounterMode(display=False) as counter:
        views = tuple(torch.randn(images, 3, 16, 16) for _ in range(2))
        method(Batch(views, torch.arange(images))).loss.backward()
    theirs = counter.get_total_flops() / images / 1e9
    assert gflop(step_operations(recipe)) == pytest.approx(theirs, rel=0.002)  # theirs has the loss in it


def test_weights_weigh_less_in_larger_batches(tiny):
    few, many = (
        sum(o.values for o in step_operations(load_recipe("demo", tiny | {"training.batch_size": batch})))
        for batch in (2, 64)
    )
    assert many < few


# Measurements


def test_every_call_is_timed_in_turn():
    calls = []
    times = time_in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0, CPU, at_least=5)
    assert {name: len(laps) for name, laps in times.items()} == {"a": 5, "b": 5}
    assert calls == ["a", "b"] * 7  # two rounds of warm-up
    assert len(time_calls(lambda: None, 0.0, CPU, warm_up=9, at_least=1)) == 1


def test_ceilings(small):
    measured = measure_ceilings(CPU, torch.float32, QUICK)
    assert 1e6 < measured.flops_per_second < 1e16
    assert 1e6 < measured.bytes_per_second < 1e14


def test_all_numbers_are_finite_and_positive(report):
    def numbers(value):
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from numbers(item)
        elif isinstance(value, float):
            yield value

    written = json.loads(report.as_json())
    del written["machine"]
    found = list(numbers(written))
    assert len(found) == 2 + 5 + 5 + 3 + 1
    assert all(0 < number < math.inf for number in found)


def test_what_a_report_says(report, small):
    assert (report.recipe, report.network, report.batch) == ("demo", "tico/resnet10-w4", 32)
    assert (report.image_size, report.precision) == (16, "float32")
    assert report.images == "1024 random images of 16 pixels, in memory"
    assert list(report.stages) == ["views", "forward", "backward", "optimiser", "target"]
    assert [speed.execution for speed in report.speeds] == ["eager"]
    assert report.against == {}
    assert report.machine["packages"]["torch"]


@pytest.mark.parametrize(
    ("second", "doubt"), [(1e18, "busy when its ceilings were measured first"), (2.0, "above 100 %")]
)
def test_nothing_is_faster_than_the_roofline_without_a_word(small, monkeypatch, capsys, second, doubt):
    """Ceilings of a machine that had other things to do are measured again, and the higher ones count."""
    measured = iter([Ceilings(1.0, 3.0), Ceilings(second, second)])
    monkeypatch.setattr("tico_ssl.bench.measure_ceilings", lambda *given: next(measured))
    report = bench("demo", overrides=small, seconds=QUICK)
    assert report.ceilings == Ceilings(second, max(3.0, second))
    assert (report.utilisation > 1) == (second < 10)
    print_report(report)
    assert doubt in report.doubt
    assert f"note       {report.doubt}" in capsys.readouterr().out


def test_a_step_above_the_roofline_is_noticed_though_its_networks_alone_are_not(small, monkeypatch):
    """Other work may have slowed the networks, which are timed first, and not the step."""
    monkeypatch.setattr("tico_ssl.bench.measure_ceilings", lambda *given: Ceilings(1e9, 1e9))
    monkeypatch.setattr("tico_ssl.bench.time_execution", lambda *given: Speed("eager", 1e6, 1e-6, 1e-6))
    report = bench("demo", overrides=small, seconds=QUICK)
    assert report.utilisation > 1
    assert "above 100 %" in report.doubt


def test_its_stages_make_up_the_step(small):
    """Within a factor of two, the median of three: this machine may have other things to do."""
    reports = [bench("demo", overrides=small, seconds=0.2) for _ in range(3)]
    ratios = [sum(report.stages.values()) / report.speeds[0].step_seconds for report in reports]
    assert 0.5 < statistics.median(ratios) < 2


def test_one_json_object(small, tmp_path):
    report = bench("demo", overrides=small, seconds=QUICK, out=tmp_path / "speed.json")
    text = (tmp_path / "speed.json").read_text()
    assert text == report.as_json()
    assert json.dumps(json.loads(text), indent=2) + "\n" == text
    assert {"machine", "command", "recipe", "batch", "network"} <= json.loads(text).keys()


def test_files_as_images(small, folder_of_images):
    report = bench("demo", folder_of_images, small | {"training.batch_size": 4, "training.workers": 1}, seconds=QUICK)
    assert report.images.startswith(folder_of_images.name)
    assert "random" not in report.images


def test_random_images_are_larger_than_large_views(tiny):
    for size, side in ((16, 16), (64, 64), (112, 128), (224, 256)):
        recipe = load_recipe("demo", tiny | {"data.image_size": size, "training.batch_size": 2})
        assert random_images(recipe).take(torch.arange(1)).shape == (1, 3, side, side)


def test_executions_of_a_device():
    assert _executions(CPU, compiled=False) == ["eager"]
    assert _executions(CPU, compiled=True) == ["eager", "compiled"]
    gpu = torch.device("cuda")
    assert _executions(gpu, compiled=False) == ["eager", "captured"]
    assert _executions(gpu, compiled=True) == ["eager", "captured", "compiled", "compiled and captured"]


# The command


def words(overrides: dict) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def test_the_command_prints_tables(small, tmp_path, capsys):
    out = str(tmp_path / "speed.json")
    result = CliRunner().invoke(app, ["bench", "demo", *words(small), "--seconds", "0.01", "--out", out])
    assert result.exit_code == 0, result.output
    text = result.output + capsys.readouterr().out
    for phrase in ("ceilings", "roofline", "random images", "views", "backward", "eager, networks alone", "loader"):
        assert phrase in text
    assert json.loads((tmp_path / "speed.json").read_text())["recipe"] == "demo"


def error_of(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["tico", "bench", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_it_is_a_verb():
    result = CliRunner().invoke(app, ["--help"])
    assert "bench" in result.output
    text = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(option in text for option in ("--against", "--seconds", "--compiled", "--data", "--out"))


def test_without_lightly_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightly", None)  # which makes its import fail
    assert "pip install lightly" in error_of(monkeypatch, capsys, "--against", "lightly")


def test_mistakes_are_said_at_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightly", types.ModuleType("lightly"))
    assert "did you mean 'lightly'?" in error_of(monkeypatch, capsys, "--against", "lightli")
    assert "symmetric" in error_of(monkeypatch, capsys, "method.symmetric=true", "--against", "lightly")
    assert "no such folder" in error_of(monkeypatch, capsys, "--out", "not/here/speed.json")
    grey = ["backbone.channels=1", "data.mean=[0.5]", "data.std=[0.2]"]
    assert "three channels" in error_of(monkeypatch, capsys, *grey, "--against", "lightly")


def test_too_large_a_batch_is_said(monkeypatch, small):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tico_ssl.bench.time_stages", full)
    with pytest.raises(UserError, match="do not fit"):
        bench("demo", overrides=small, seconds=QUICK)


def test_a_comparison(small, monkeypatch, capsys):
    pretended = [rivals.RivalSpeed("as in its example", 2.0, 4.0)]
    monkeypatch.setattr("tico_ssl.bench.require", lambda rival, recipe: None)
    monkeypatch.setattr("tico_ssl.bench.time_lightly", lambda subject, seconds: pretended)
    command = ["bench", "demo", *words(small), "--seconds", "0.01", "--against", "lightly"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    text = result.output + capsys.readouterr().out
    rows = [line for line in text.splitlines() if "as in its example" in line]
    assert [row.split("│")[2].strip() for row in rows] == ["16", "8"]  # 32 images in two and in four seconds


def test_against_lightly_itself(small):
    pytest.importorskip("lightly")
    report = bench("demo", overrides=small, against="lightly", seconds=QUICK)
    assert [speed.variant for speed in report.against["lightly"]] == ["as in its example", "channels_last"]
    assert all(speed.network_seconds > 0 and speed.training_seconds > 0 for speed in report.against["lightly"])


# A user's own images


def fed(**changes) -> Feeding:
    """Files whose decoding bounds, with no help from memory."""
    slow = Feeding(512, 8, 500.0, 900.0, 3950.0, 20_000.0, loaded=3_900.0, step=66_000.0, stored=False)
    return dataclasses.replace(slow, **changes)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "decoding bounds: 3,900 of 66,000 images/s"),
        ({"cropped": 400.0}, "cropping bounds: 3,900 of 66,000 images/s"),
        ({"decoded": None, "cropped": None}, "loading bounds: 3,900 of 66,000 images/s"),
        (
            {"stored": True},
            "decoding bounds: 3,900 of 66,000 images/s; from the second epoch on images come from the store at 20,000",
        ),
        (
            {"stored": True, "from_memory": 70_000.0},
            "decoding bounds: 3,900 of 66,000 images/s; from the second epoch on images come from the store",
        ),
        ({"step": 300.0, "stored": True}, "the step bounds: 300 images/s; images would come at 3,900"),
    ],
)
def test_what_bounds_training_is_a_sentence(changes, expected):
    assert fed(**changes).bound == expected


def test_what_would_help():
    def keys(data, feeding, cores=8):
        return [advice.partition(":")[0] for advice in feeding.advice(DataConfig(source="photos", **data), cores)]

    assert keys({}, fed()) == ["tico data pack photos images.tico"]
    assert keys({}, fed(), cores=16) == ["training.workers=16", "tico data pack photos images.tico"]
    assert keys({"store": "none"}, fed()) == ["data.store=auto", "tico data pack photos images.tico"]
    assert keys({"reduced_decoding": False}, fed(stored=True)) == ["data.reduced_decoding=true"]
    assert keys({}, fed(stored=True)) == []
    assert keys({"store": "none"}, fed(step=1.0), cores=16) == []  # nothing of it would


def test_a_folder_is_decoded_and_cropped_and_the_bound_is_said(small, folder_of_images, capsys):
    changes = small | {"training.batch_size": 4, "training.workers": 1}
    report = bench("demo", folder_of_images, changes, seconds=QUICK)
    feeding = report.feeding
    assert (feeding.sampled, feeding.workers, feeding.stored) == (12, 1, True)
    rates = (
        feeding.decoded,
        feeding.cropped,
        feeding.decoded_by_all,
        feeding.from_memory,
        feeding.loaded,
        feeding.step,
    )
    assert all(0 < rate < math.inf for rate in rates)
    assert feeding.step == pytest.approx(report.batch / report.speeds[0].step_seconds)
    print_report(report)
    text = capsys.readouterr().out
    assert all(f"\n{word} " in text for word in ("decoding", "cropping", "memory", "result"))
    assert report.bound in text
    assert json.loads(report.as_json())["bound"] == report.bound


def test_images_in_memory_are_not_decoded(small, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x_train=np.zeros((40, 16, 16, 3), np.uint8))
    report = bench("demo", str(tmp_path / "x.npz"), small, seconds=QUICK)
    assert report.feeding.decoded is None
    assert report.bound.startswith(("the step bounds: ", "loading bounds: "))
    print_report(report)
    assert "decoding" not in capsys.readouterr().out


def test_random_images_are_nobodys_own(report):
    assert report.feeding is None
    assert report.bound is None
