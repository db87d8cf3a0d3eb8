"""Several protocols in one command: cheap ones first, said before, written as they come, not repeated; a quick look."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tico_ssl import evaluate
from tico_ssl.cli import app
from tico_ssl.config import catalogue
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.source import spread_evenly
from tico_ssl.evaluations import _session, fine_tune, linear_augmented, semi_supervised
from tico_ssl.evaluations._classification import training
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._cost import COSTS, cheap_first, cost_of
from tico_ssl.evaluations._estimate import Pace, Work, measure_pace
from tico_ssl.evaluations._evaluate import evaluate_all
from tico_ssl.features.lazy import LazyBackbones
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.finished import finished
from tico_ssl.results.record import Result
from tico_ssl.runtime.errors import UserError

TRAINING = {"linear-augmented", "semi-supervised", "fine-tune"}
SHORT = [f"{protocol}.{key}" for protocol in sorted(TRAINING) for key in ("epochs=1", "batch_size=8", "precision=fp32")]
SHORT += [
    "alpha-req.first=1",
    "svm.costs=[1.0]",
    "few-shot.draws=2",
    "shares=[0.2]",
    "linear.iterations=3",
    "corruptions.kinds=[jpeg]",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a backbone file and labelled images."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_backbone(
        build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 8), tmp_path / "b.safetensors"
    )
    write_images(tmp_path)
    return tmp_path


def write_images(folder, seed=0):
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8) for count in (48, 20)]
    labels = [np.arange(len(some)) % 4 for some in images]
    np.savez(folder / "x.npz", x_train=images[0], y_train=labels[0], x_test=images[1], y_test=labels[1])


def tico(*words):
    result = CliRunner().invoke(app, ["evaluate", "b.safetensors", *words, "--data", "x.npz"])
    assert result.exit_code == 0, result.output
    return result.output


def lines(folder, name="results.jsonl"):
    file = folder / "b" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


# ---------------------------------------------------------------------------------------------------- order


def test_every_protocol_declares_its_cost():
    for name in catalogue.entries("evaluations"):
        assert catalogue.declaration("evaluations", name, "COST") in COSTS
    assert {cost_of(name) for name in ("fine-tune", "semi-supervised", "detection", "segmentation")} == {"network"}
    assert {cost_of(name) for name in ("knn", "rankme", "linear")} == {"features"}
    listed = [line.split() for line in CliRunner().invoke(app, ["list", "evaluations"]).output.splitlines()]
    assert {name: cost for name, cost, *_ in listed} == {
        name: cost_of(name) for name in catalogue.entries("evaluations")
    }


def test_cheap_ones_come_first_and_the_order_is_kept_otherwise():
    assert cheap_first(["fine-tune", "svm", "rankme", "lidar", "knn"]) == ["rankme", "knn", "svm", "lidar", "fine-tune"]


def test_a_cost_that_there_is_not(tmp_path, monkeypatch):
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "dear.py").write_text('COST = "hed"\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="did you mean 'head'"):
        cost_of("my_lab.dear")


def test_all_runs_cheap_ones_first_and_is_not_done_twice(here):
    text = tico("all", *SHORT)
    made = [line["protocol"] for line in lines(here)]
    assert made == cheap_first(made)
    assert made[-2:] == ["fine-tune", "semi-supervised"]
    begun = [line.split()[1] for line in text.splitlines() if line.startswith("evaluating ")]
    assert begun == made
    assert f"evaluating {made[0]} (1 of {len(made)})" in text
    (plan,) = [line for line in text.splitlines() if line.startswith("in order: ")]
    assert [word.split(" ")[0] for word in plan.removeprefix("in order: ").split(";")[0].split(", ")] == made
    assert all(f"{protocol} (about " in plan for protocol in TRAINING)
    assert re.search(r"; in all about \d+ s of training; ", plan)
    said = text.index("timing a few steps"), text.index(plan), text.index(f"evaluating {made[0]} (1 of {len(made)})")
    assert sorted(said) == list(said)
    assert "times are rough" in plan

    again = tico("all", *SHORT)
    assert f"already done: {', '.join(made)}; --again" in again
    assert len(lines(here)) == len(made)
    for protocol in made:  # the table has them all the same
        assert f"│ {protocol} " in again

    other = tico("all", *SHORT, "knn.voters=[{k: 3, temperature: 0.5}]")
    assert [line["protocol"] for line in lines(here)] == [*made, "knn"]
    assert "evaluating knn\n" in other


def test_named_protocols_keep_their_order_and_are_always_computed(here):
    for _ in range(2):
        text = tico("rankme", "knn")
    assert "in order: rankme, knn" in text
    assert [line["protocol"] for line in lines(here)] == ["rankme", "knn"] * 2


def some(monkeypatch, *names):
    """A catalogue of a few protocols."""
    every = catalogue.entries
    monkeypatch.setattr(catalogue, "entries", lambda kind: list(names) if kind == "evaluations" else every(kind))


def test_what_was_done_is_known_by_images_checkpoint_and_settings(here, monkeypatch):
    some(monkeypatch, "knn", "rankme")
    made = lambda: len(lines(here))  # noqa: E731
    tico("all")
    tico("all")
    assert made() == 2
    tico("all", "--again")
    assert made() == 4
    evaluate_all("b.safetensors", ["all"], "x.npz")  # in Python always
    evaluate("b.safetensors", "knn", "x.npz")
    assert made() == 7
    write_images(here, seed=1)  # the same name, number and size
    tico("all")
    assert made() == 9
    arrays = dict(np.load(here / "x.npz"))
    np.savez(here / "x.npz", **arrays | {"y_test": arrays["y_test"][::-1]})
    tico("all")
    assert made() == 11
    torch.manual_seed(1)
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2", zero_gamma=False), 8), here / "b.safetensors")
    tico("all")
    assert made() == 13


def test_results_that_are_not_the_same():
    one = Result("knn", {"k": 1}, {"source": "x"}, "abc", 0, {"trained": {"top1": 1.0}}, 1.0, "digest")
    line = vars(one) | {"data": {"source": "x", "labelled": 3}}
    assert finished([line, line | {"seconds": 2.0}], one) == replace(one, data=line["data"], seconds=2.0)
    for key, value in {
        "protocol": "svm",
        "settings": {},
        "data": {},
        "checkpoint": "d",
        "seed": 1,
        "images": "e",
    }.items():
        assert finished([line | {key: value}], one) is None
    rounded = one.line | {"data": one.data | {"precision": "bf16"}}
    assert finished([rounded], one) is None
    assert finished([rounded], replace(one, data=rounded["data"])) is not None
    unknown = replace(one, images=None)  # images without an identity may be others
    assert finished([vars(unknown)], unknown) is None
    assert finished([{key: value for key, value in line.items() if key != "seconds"}, {"numbers": 3}], one) is None


def test_a_result_is_written_before_the_next_protocol_begins(here, monkeypatch):
    written = []
    real = _session.evaluate_with
    monkeypatch.setattr(_session, "evaluate_with", lambda *a: written.append(len(lines(here))) or real(*a))
    tico("rankme", "knn", "spectrum")
    assert written == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------- a quick look


def test_a_quick_look_is_apart_and_marked(here, monkeypatch):
    monkeypatch.setattr(_session, "QUICK_TRAIN", 12)
    monkeypatch.setattr(_session, "QUICK_TEST", 8)
    text = tico("--quick", "linear.iterations=3", "few-shot.shots=[1]")
    assert "a quick look at 12 training and 8 test images" in text
    assert lines(here) == []
    quick = lines(here, "quick_results.jsonl")
    assert {line["protocol"] for line in quick} == {
        name for name in catalogue.entries("evaluations") if cost_of(name) == "features"
    } - {"alpha-req"}  # which so few images do not allow
    assert all(line["data"] | {"quick": True, "train": 12, "test": 8} == line["data"] for line in quick)
    tico("knn")
    (whole,) = lines(here)
    (same,) = [line for line in quick if line["protocol"] == "knn"]
    assert "quick" not in whole["data"]
    assert whole["images"] != same["images"]


def test_quick_images_are_spread_evenly(here, monkeypatch):
    monkeypatch.setattr(_session, "QUICK_TRAIN", 12)
    context = open_context("b.safetensors", "x.npz")
    quick = _session.quick_look(context)
    assert torch.equal(quick.train.images, context.train.images[spread_evenly(48, 12)])
    assert len(quick.test) == len(context.test)
    assert context.data["train"] == 48


def test_a_quick_look_by_a_slow_protocol_is_refused():
    with pytest.raises(UserError, match=r"^fine-tune is not for a quick look, which needs features only: .*knn"):
        evaluate_all("nowhere", ["knn", "fine-tune"], quick=True)


# ---------------------------------------------------------------------------------------------------- estimates


def test_work_is_what_is_done(here, monkeypatch):
    """Images that the steps see, counted."""
    seen = []
    real = training.Classifier.forward
    monkeypatch.setattr(
        training.Classifier, "forward", lambda self, batch: seen.append(len(batch.views[0])) or real(self, batch)
    )
    context = open_context("b.safetensors", "x.npz")
    context = replace(context, backbones=LazyBackbones({"trained": context.backbones["trained"]}))
    short = {"epochs": 2, "batch_size": 9, "precision": "fp32"}
    for module, more in (
        (fine_tune, {}),
        (semi_supervised, {"shares": [0.25, 0.5], "draws": 2}),
        (linear_augmented, {"lrs": [0.1, 0.2]}),
    ):
        seen.clear()
        config = module.Config(**short, **more)
        work = module.work(context, config)
        module.run(context, config)
        assert sum(seen) == (work.frozen if module is linear_augmented else work.trained)


def test_processors_that_feed_and_compute_take_the_sum_and_others_the_longer():
    assert Pace(1.0, 3.0, 2.0, ahead=True).seconds(Work(frozen=10, trained=100)) == 10 * 2 + 100 * 3
    assert Pace(1.0, 3.0, 2.0).seconds(Work(frozen=10, trained=100)) == 10 * 3 + 100 * 5
    assert Work(2, 3).times(2) == Work(4, 6)


def test_a_pace_is_measured_and_leaves_all_as_it_was(here, folder_of_images):
    context = open_context("b.safetensors", "x.npz")
    before = {name: value.clone() for name, value in context.backbones["trained"].state_dict().items()}
    state = torch.random.get_rng_state()
    pace = measure_pace(context)
    assert torch.equal(torch.random.get_rng_state(), state)
    files = open_context("b.safetensors", str(folder_of_images))
    for found in (pace, measure_pace(files)):
        assert all(0 < seconds < 1 for seconds in (found.frozen, found.trained, found.feeding))
    after = context.backbones["trained"].state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
