"""The model of training on many GPUs: its formulas, its fit to what was measured, and `tico plan`."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tico_ssl.bench.scaling import GPUS, TRACED, Gpu, Links, Work, bytes_sent, rows, work_of
from tico_ssl.cli import app
from tico_ssl.config.recipe import load_recipe
from tico_ssl.runtime.distributed import Sent
from tico_ssl.runtime.errors import UserError
from tiny import TINY

LOGS = Path(__file__).parents[1] / "benchmarks" / "logs" / "speed"
SMALL = TINY | {"training.batch_size": 64, "data.limit": 6400}
LINKS = Links()


@pytest.fixture(scope="module")
def work():
    return work_of(load_recipe("demo", SMALL), GPUS["h200"])


def test_bytes_of_collective_operations_are_the_fewest_possible():
    assert bytes_sent(Sent("sum", 800, ""), 8) == 2 * 700  # scatter and gather an eighth of it to seven others
    assert bytes_sent(Sent("gather", 100, ""), 8) == bytes_sent(Sent("scatter", 100, ""), 8) == 700


def test_one_gpu_sends_nothing_and_more_take_longer_for_a_collective_operation():
    times = [LINKS.seconds(Sent("sum", 10**8, ""), world) for world in (1, 2, 4, 8, 16, 64, 1024)]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[3] == pytest.approx(2 * 7 / 8 * 1e8 / 450e9, rel=0.05)  # a large one is bound by the links
    small = LINKS.seconds(Sent("sum", 4, ""), 1024)
    assert small == pytest.approx(5e-6 + 2 * (3e-6 + 7 * 5e-6), rel=0.01)  # a small one by hops along a tree


def test_between_nodes_a_ring_runs_over_all_adapters_of_a_node():
    assert LINKS.bandwidth(8) == 450e9
    assert LINKS.bandwidth(16) == 8 * 50e9
    assert Links(per_node=2).bandwidth(4) == 2 * 50e9


@pytest.mark.parametrize(
    ("log", "operations", "roofline"),
    [("resnet18-512-h200", 150, 98_998), ("resnet50-packed-h200", 384, 8_222)],
)
def test_the_model_is_fitted_to_what_was_measured(log, operations, roofline):
    """Operations and roofline as `work_of` finds them for these recipes, which takes longer than a test should."""
    report = json.loads((LOGS / f"{log}.json").read_text())
    assert report["roofline"]["images_per_second"] == pytest.approx(roofline, rel=0.01)
    model = Work(roofline, operations, True, ([], []))
    seconds, _ = model.seconds(report["batch"], 1, GPUS["h200"], LINKS)
    captured = next(speed for speed in report["speeds"] if speed["execution"] == "captured")
    assert seconds == pytest.approx(captured["step_seconds"], rel=0.06)


def test_the_model_is_fitted_to_all_batches_that_were_measured():
    lines = [json.loads(line) for line in (LOGS / "step-growth-h200.jsonl").read_text().splitlines()[1:]]
    model = Work(98_998, 150, True, ([], []))
    for line in (line for line in lines if line["execution"] == "captured"):
        seconds, _ = model.seconds(line["batch"], 1, GPUS["h200"], LINKS)
        assert seconds == pytest.approx(line["milliseconds"] / 1000, rel=0.07), line["batch"]


def test_what_is_sent_is_that_of_the_batch(work):
    """What TiCo sends does not grow with it, and what is found with few images is found with as many."""
    few, more = (work.sent(images) for images in TRACED)
    assert (few, more) == work.traced
    assert work.sent(1000) == few
    simclr = work_of(load_recipe("demo", SMALL | {"method": {"name": "simclr", "hidden": 16, "dim": 8}}), GPUS["h200"])
    gathered = [one.bytes for one in simclr.sent(1000) if one.purpose.startswith("loss") and one.kind == "gather"]
    assert gathered == [1000 * 8 * 4] * 2


def test_rows_of_the_table_add_up(work):
    recipe = load_recipe("demo", SMALL)
    found = rows(work, recipe, 6400, (1, 2, 3, 32, 64), GPUS["h200"], LINKS)
    assert [(row.gpus, row.images_per_gpu, row.batch) for row in found] == [(1, 64, 64), (2, 32, 64), (32, 2, 64)]
    for row in found:
        step = row.computing_seconds + row.sending_seconds
        assert row.images_per_second == pytest.approx(64 / step)
        assert row.hours == pytest.approx(recipe.training.epochs * 100 * step / 3600)
        assert row.gpu_hours == pytest.approx(row.gpus * row.hours)
        assert 0 < row.efficiency <= 1
    assert found[0].efficiency == 1 and found[0].megabytes_sent == 0
    wide = rows(work, recipe, 6400, (1, 8), GPUS["h200"], LINKS, per_gpu=16)
    assert [row.batch for row in wide] == [16, 128]


def test_a_faster_gpu_gains_nothing_where_sending_takes_all(work):
    recipe = load_recipe("demo", SMALL)
    ideal = Gpu("ideal", GPUS["h200"].ceilings, math.inf, 0.0)
    (row,) = rows(work, recipe, 6400, (32,), ideal, LINKS)
    assert row.computing_seconds == 0 < row.sending_seconds


def test_the_command_prints_a_table_and_writes_it(tmp_path):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", "demo", *words, "--gpus", "4", "--nodes", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "8 *" in result.output and "gradients" in result.output
    plan = json.loads(out.read_text())
    assert [row["gpus"] for row in plan["rows"]] == [1, 2, 4, 8, 16, 32]
    assert {purpose["name"] for purpose in plan["sent"]} == {"BatchNorm", "gradients", "loss and its state"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["photos"], "Give --images"),
        (["imagenet/tico", "--gpu", "h300"], "neither h200 nor a file"),
        (["imagenet/tico", "--gpu", __file__], "not a file that `tico bench --out` has written"),
        (["imagenet/tico", "--out", "nowhere/plan.json"], "there is no such folder"),
    ],
)
def test_mistakes_are_answered_before_any_work(words, reason):
    error = CliRunner().invoke(app, ["plan", *words]).exception
    assert isinstance(error, UserError) and reason in str(error)


def test_the_report_of_a_bench_is_a_gpu(work):
    from tico_ssl.bench.planning import gpu_of

    gpu = gpu_of(str(LOGS / "resnet18-512-h200.json"))
    assert gpu.name == "NVIDIA H200"
    assert gpu.share == pytest.approx(512 / 0.00776 / 99_115, rel=0.01)
