"""The loop as a user meets it: it learns, it resumes to the bit, it warns, it stops, it refuses."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tico_ssl import embed, evaluate, pretrain
from tico_ssl.networks.storage import load_backbone
from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.errors import Interrupted, UserError
from tico_ssl.training import pretrain as loop
from tico_ssl.training.checkpoint import read_checkpoint
from tico_ssl.training.monitor import spread
from tico_ssl.training.setup import build_method

CLOCK = ("seconds", "images_per_second", "data_wait")


def state_of(run):
    return read_checkpoint(run.checkpoint_file)


def assert_same(one, other, where="state"):
    """Equal to the bit, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            assert_same(a, b, f"{where}.{i}")
    else:
        assert one == other, where


def without_clock(lines):
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def interrupt_after(monkeypatch, count: int, number: int = signal.SIGTERM) -> None:
    """Ask the run to stop while it makes a step."""
    steps, original = iter(range(1, 100)), loop.Step.__call__

    def pull_the_plug(*arguments):
        if next(steps) == count:
            os.kill(os.getpid(), number)
        return original(*arguments)

    monkeypatch.setattr(loop.Step, "__call__", pull_the_plug)


@pytest.mark.parametrize(("optimizer", "precision"), [("lars", "fp32"), ("sgd", "fp64"), ("adamw", "bf16")])
def test_an_interrupted_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, tiny, monkeypatch, optimizer, precision):
    tiny |= {"optimizer.name": optimizer, "method.view_order": "alternate", "training.knn_every_epochs": 1}
    tiny |= {"training.precision": precision}
    whole = pretrain("demo", out=tmp_path / "whole", overrides=tiny)

    interrupt_after(monkeypatch, 6)
    with pytest.raises(Interrupted, match="stopped after step 6 of 9"):
        pretrain("demo", out=tmp_path / "parts", overrides=tiny)
    monkeypatch.undo()
    parts = pretrain("demo", out=tmp_path / "parts", overrides=tiny, resume=True)

    one, other = state_of(whole), state_of(parts)
    one.pop("seconds"), other.pop("seconds")
    assert_same(one, other)
    assert without_clock(whole.metrics()) == without_clock(parts.metrics())
    assert whole.backbone_file.read_bytes() == parts.backbone_file.read_bytes()


def test_a_run_on_files_resumes_to_the_bit_with_other_workers(tmp_path, tiny, monkeypatch, folder_of_images):
    (folder_of_images / "cats" / "1.png").write_bytes(b"")
    settings = tiny | {"training.batch_size": 4, "data.most_bad": 0.2, "training.workers": 1}
    del settings["data.limit"]
    whole = pretrain("demo", data=str(folder_of_images), out=tmp_path / "whole", overrides=settings)
    interrupt_after(monkeypatch, 4)
    with pytest.raises(Interrupted):
        pretrain("demo", data=str(folder_of_images), out=tmp_path / "parts", overrides=settings)
    monkeypatch.undo()
    settings |= {"training.workers": 3}
    parts = pretrain("demo", data=str(folder_of_images), out=tmp_path / "parts", overrides=settings, resume=True)
    assert without_clock(whole.metrics()) == without_clock(parts.metrics())
    assert whole.backbone_file.read_bytes() == parts.backbone_file.read_bytes()
    assert whole.bad_files_file.read_text() == parts.bad_files_file.read_text() != ""


def test_interruption_in_the_middle_of_an_epoch_resumes_in_the_middle(tmp_path, tiny, monkeypatch):
    interrupt_after(monkeypatch, 4)
    with pytest.raises(Interrupted):
        pretrain("demo", out=tmp_path / "parts", overrides=tiny)
    monkeypatch.undo()
    assert state_of(open_run(tmp_path / "parts"))["step"] == 4  # of three steps per epoch
    parts = pretrain("demo", out=tmp_path / "parts", overrides=tiny, resume=True)
    whole = pretrain("demo", out=tmp_path / "whole", overrides=tiny)
    assert_same(state_of(whole)["method"], state_of(parts)["method"])
    assert without_clock(whole.metrics()) == without_clock(parts.metrics())


def test_python_command_and_file_give_the_same_run(tmp_path, tiny):
    by_python = pretrain("demo", out=tmp_path / "python", overrides=tiny)
    words = [f"{key}={value}" for key, value in tiny.items()]
    command = [sys.executable, "-m", "tico_ssl", "pretrain", "demo", *words, "--out", str(tmp_path / "command")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    by_file = pretrain(by_python.recipe_file, out=tmp_path / "file")
    for other in (open_run(tmp_path / "command"), by_file):
        assert other.recipe() == by_python.recipe()
        assert_same(state_of(by_python)["method"], state_of(other)["method"])


def test_every_log_line_carries_the_signs_of_collapse(tmp_path, tiny):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny)
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 10))
    for line in lines:
        assert line["loss"] == pytest.approx(line["invariance"] + line["contrast"], rel=1e-5)
        assert 1 <= line["participation_ratio"] <= 8
        assert 1 / 8 - 1e-6 <= line["largest_eigenvalue"] <= 1
        assert 0 < line["embedding_std"] <= 8**-0.5 + 1e-6
        assert -1 <= line["mean_cosine"] <= 1
        assert line["images_per_second"] > 0
        assert 0 <= line["data_wait"] <= 1
    assert lines[0]["lr"] == 0.0  # warm-up begins at zero
    assert lines[0]["ema_decay"] == pytest.approx(run.recipe().method.ema_start)


def test_the_run_folder_is_as_documented(tmp_path, tiny):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny)
    names = {path.name for path in run.folder.iterdir()}
    assert {"recipe.yaml", "environment.json", "metrics.jsonl", "train.log", "views.png", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {
        "last.pt",
        "last.pt.1",
        "backbone.safetensors",
    }
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0]


def test_the_learning_rate_and_its_scaling_are_printed(tmp_path, tiny, capsys):
    pretrain("demo", out=tmp_path / "run", overrides=tiny | {"optimizer.scale_lr": True, "optimizer.lr": 0.4})
    assert "learning rate 0.05 (0.4 x 32/256)" in capsys.readouterr().out


def test_it_learns_what_the_patterns_are(tmp_path):
    """A quarter of the demo: classes that the network was never told are near each other in its features."""
    shorter = {"backbone.name": "tico/resnet10-w16", "data.limit": 5000, "training.epochs": 5}
    pretrain("demo", out=tmp_path / "run", overrides=shorter)
    numbers = evaluate(tmp_path / "run", "knn").numbers
    assert numbers["untrained"]["top1_k20"] < 20  # chance is 10
    assert numbers["trained"]["top1_k20"] > numbers["untrained"]["top1_k20"] + 20
    first, *_, last = open_run(tmp_path / "run").metrics()[:-1]
    assert last["invariance"] < first["invariance"]


def test_an_existing_folder_is_refused_resumed_or_replaced(tmp_path, tiny):
    out = tmp_path / "run"
    pretrain("demo", out=out, overrides=tiny | {"training.epochs": 1})
    with pytest.raises(UserError, match=r"resume=True.*overwrite=True"):
        pretrain("demo", out=out, overrides=tiny | {"training.epochs": 1})
    with pytest.raises(UserError, match=r"training.seed was 0, is 3"):
        pretrain("demo", out=out, overrides=tiny | {"training.epochs": 1, "training.seed": 3}, resume=True)
    pretrain("demo", out=out, overrides=tiny | {"training.epochs": 2}, overwrite=True)
    assert open_run(out).metrics()[-1]["step"] == 6


def test_overwrite_leaves_a_folder_alone_that_is_no_run(tmp_path, tiny):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run folder"):
        pretrain("demo", out=tmp_path, overrides=tiny, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_finished_run_has_nothing_to_resume(tmp_path, tiny, capsys):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny)
    before = run.checkpoint_file.read_bytes()
    pretrain("demo", out=tmp_path / "run", overrides=tiny, resume=True)
    assert "complete" in capsys.readouterr().out
    assert run.checkpoint_file.read_bytes() == before


def test_collapse_is_said_in_words(tmp_path, tiny, capsys):
    """Without contrast nothing holds the embeddings apart; the last layer's bias shows the way to one point."""
    settings = {"optimizer.lr": 0.05, "optimizer.warmup_epochs": 0.0, "training.epochs": 40, "method.rho": 0.0}
    pretrain("demo", out=tmp_path / "run", overrides=tiny | settings | {"method.last_bias": True})
    assert "warning: this looks like collapse: different images have cosine" in capsys.readouterr().out


def test_collapse_signs_at_the_known_points():
    healthy = {"loss": 0.4, "mean_cosine": 0.02, "largest_eigenvalue": 0.05}
    assert collapse_signs(healthy, 8.0) == {}
    collapsed = {"loss": 7.9, "mean_cosine": 0.99, "largest_eigenvalue": 0.98}
    assert collapse_signs(collapsed, 8.0).keys() == {"loss", "mean_cosine", "largest_eigenvalue"}
    assert "8 means total collapse" in collapse_signs(collapsed, 8.0)["loss"]


def test_spread_of_known_embeddings():
    one_point = spread(torch.ones(16, 4))
    assert one_point["embedding_std"] == pytest.approx(0, abs=1e-3)
    assert one_point["mean_cosine"] == pytest.approx(1, abs=1e-5)
    crossing = spread(torch.cat([torch.eye(4), -torch.eye(4)]))
    assert crossing["embedding_std"] == pytest.approx(0.5)  # 1 / sqrt(4): spread as far as can be
    z = torch.nn.functional.normalize(torch.randn(9, 5, dtype=torch.float64), dim=1)
    cosines = (z @ z.T)[~torch.eye(9, dtype=torch.bool)]
    assert spread(z)["mean_cosine"] == pytest.approx(float(cosines.mean()), abs=1e-6)


def test_gradient_clipping_bounds_the_step(tmp_path, tiny):
    settings = tiny | {"optimizer.name": "sgd", "optimizer.scale_lr": False, "optimizer.momentum": 0.0}
    settings |= {"optimizer.lr": 1.0, "optimizer.warmup_epochs": 0.0, "optimizer.weight_decay": 0.0}
    settings |= {"training.clip_gradient": 1e-3, "training.epochs": 1, "data.limit": 32, "optimizer.end_lr_ratio": 1.0}
    run = pretrain("demo", out=tmp_path / "run", overrides=settings)
    fresh = build_method(run.recipe(), torch.device("cpu"), torch.float32).state_dict()
    trained = state_of(run)["method"]
    names = [name for name in fresh if not name.startswith(("target", "criterion")) and "running" not in name]
    moved = math.sqrt(sum(float((trained[n] - fresh[n]).square().sum()) for n in names if fresh[n].is_floating_point()))
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_a_folder_of_images_of_any_size_without_labels(tmp_path, tiny, folder_of_images, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(folder_of_images.rglob("*.png"))):
        path.rename(flat / f"{number}.png")
    settings = tiny | {"training.batch_size": 4, "training.knn_every_epochs": 1, "training.workers": 3}
    del settings["data.limit"]
    run = pretrain("demo", data=str(flat), out=tmp_path / "run", overrides=settings)
    assert "12 images (no labels), decoded by 3 processes" in capsys.readouterr().out
    assert not any("knn" in key for line in run.metrics() for key in line)


def test_knn_is_measured_on_class_folders_without_a_test_split(tmp_path, tiny, folder_of_images):
    settings = tiny | {"training.batch_size": 4, "training.knn_every_epochs": 2, "data.limit": None}
    run = pretrain("demo", data=str(folder_of_images), out=tmp_path / "run", overrides=settings)
    measured = [line["epoch"] for line in run.metrics() if "knn_top1_k20" in line]
    assert measured == [2, 3]  # every two epochs, and after the last
    tested = [line["test_images"] for line in run.metrics() if "knn_top1_k20" in line]
    assert tested == [2, 2]  # a fifth of twelve


def test_weight_standardisation_is_baked_into_the_saved_backbone(tmp_path, tiny):
    run = pretrain("demo", out=tmp_path / "run", overrides=tiny | {"backbone.weight_standardisation": True})
    backbone = load_backbone(run.folder)
    assert backbone.config.weight_standardisation is False
    weight = backbone.network.state_dict()["layer1.0.conv1.weight"]
    assert torch.allclose(weight.flatten(1).mean(1), torch.zeros(len(weight)), atol=1e-6)
    method = build_method(run.recipe(), torch.device("cpu"), torch.float32)
    method.load_state_dict(state_of(run)["method"])
    images = torch.randn(4, 3, 16, 16)
    assert torch.allclose(backbone(images), method.backbone.eval()(images), atol=1e-5)


class Squares(torch.utils.data.Dataset):
    """Pictures as a user's own data set gives them: PIL images of several sizes with a label."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return Image.new("RGB", (20 + index, 30), (10 * index, 100, 200)), index % 2


def test_a_data_set_from_python(tmp_path, tiny, capsys):
    settings = tiny | {"training.batch_size": 8, "training.epochs": 1}
    del settings["data.limit"]
    run = pretrain("demo", data=Squares(), out=tmp_path / "run", overrides=settings)
    assert "tico on python:Squares: 24 images" in capsys.readouterr().out
    assert run.recipe().data.source == "python:Squares"
    with np.load(embed(run.folder, data=Squares(), out=tmp_path / "features.npz")) as table:
        assert len(table["features"]) == 24
    command = [sys.executable, "-m", "tico_ssl", "embed", str(run.folder), "--out", str(tmp_path / "again.npz")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: data 'python:Squares' was a data set in a Python program")
