"""The command line: helpful when asked, one line and exit code 2 when something is wrong, never a traceback."""

import contextlib
import io
import os
import re
import subprocess
import sys
from importlib import metadata
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import tico_ssl
from tico_ssl.cli import app, main
from tico_ssl.cli._app import split_words
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import load_backbone, save_backbone
from tico_ssl.results.run_folder import create_run

VERBS = ["pretrain", "evaluate", "embed", "search", "curate", "export", "finetune", "predict"]
VERBS += ["study", "bench", "list", "describe"]
CATALOGUES = ["recipes", "studies", "methods", "views", "data", "backbones", "evaluations", "exporting"]
TINY = [
    "training.epochs=1",
    "training.batch_size=4",
    "training.knn_every_epochs=0",
    "training.precision=fp32",
    "method.hidden=8",
    "method.dim=4",
    "backbone.name=tico/resnet10-w2",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tico(capsys):
    """Run a command in this process; returns what it printed."""

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output + capsys.readouterr().out

    return run


def error_of(*words: str) -> str:
    """The one line that a command ends with."""
    errors = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tico", *words]),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as stopped,
    ):
        main()
    assert stopped.value.code == 2
    line = errors.getvalue()
    assert line.startswith("error: ")
    assert line.endswith("\n")
    assert line.count("\n") == 1
    return line.strip()


@pytest.fixture
def images(here):
    """Labelled images in folders, three classes of four."""
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (here / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 256, (20 + number, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "photos" / name / f"{number}.png")
    return "photos"


@pytest.fixture
def run(here, images):
    """A run folder as training leaves it, without the training."""
    changes = {"data.source": images, "data.image_size": 16, "backbone.name": "tico/resnet10-w2"}
    recipe = load_recipe("demo", changes)
    create_run(here / "run", recipe, overwrite=False)
    torch.manual_seed(0)
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w2"), 16)
    save_backbone(backbone, here / "run" / "checkpoints" / "backbone.safetensors")
    return "run"


# ---------------------------------------------------------------------------------------------------- words


def test_a_path_may_have_an_equals_sign(here):
    (here / "lr=0.1.yaml").write_text("base: demo")
    for path in ("runs/lr=0.1/recipe.yaml", "/abs/lr=0.1", "lr=0.1.yaml"):
        assert split_words([path, "optimizer.lr=0.2"]) == (path, {"optimizer.lr": 0.2})
    assert split_words(["lr=0.2.yaml"]) == (None, {"lr": "0.2.yaml"})
    for key in ("views.*.blur", "views.0.blur", "backbone.arguments.drop_path_rate", "few-shot.draws"):
        assert split_words([f"{key}=1"]) == (None, {key: 1})
    assert split_words(["training.init=runs/a=b/x.yaml"]) == (None, {"training.init": "runs/a=b/x.yaml"})


def test_a_run_in_a_folder_with_an_equals_sign_goes_on(here, tico):
    words = ["pretrain", "data.limit=8", "data.image_size=16", *TINY, "--out", "runs/lr=0.1"]
    tico(*words)
    assert "nothing to train" in tico("pretrain", "runs/lr=0.1/recipe.yaml", "--out", "runs/lr=0.1", "--resume")


# ---------------------------------------------------------------------------------------------------- help


def test_help_names_every_verb(tico):
    text = tico("--help")
    for verb in VERBS:
        assert re.search(rf"^\s+{verb}\b", text, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(tico, verb):
    text = tico(verb, "--help")
    assert "Usage" in text
    assert len(text.splitlines()) > 5
    commands = {command.name or command.callback.__name__.rstrip("_"): command for command in app.registered_commands}
    assert commands[verb].callback.__doc__.splitlines()[0].rstrip(".").split("`")[0] in " ".join(text.split())


def test_the_version_is_said(tico):
    assert tico("--version") == f"tico-ssl {tico_ssl.__version__}\n"
    assert tico_ssl.__version__ == metadata.version("tico-ssl")
    assert {"pretrain", "evaluate", "load_backbone", "__version__"} <= set(dir(tico_ssl))


def test_frequent_settings_are_options_too(here):
    words = ["pretrain", "demo", "--epochs", "0", "--batch-size", "8"]
    assert "training.epochs" in error_of(*words)
    assert "training.epochs is given twice: 3 and 4" in error_of("pretrain", "training.epochs=3", "--epochs", "4")


def test_a_command_is_needed():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage" in result.output


# ---------------------------------------------------------------------------------------------------- list and describe


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("recipes", ["demo", "cifar10/tico", "imagenet/tico"]),
        ("methods", ["tico"]),
        ("views", ["byol", "byol-small"]),
        ("data", ["textures", "cifar10", "imagenet"]),
        ("backbones", ["torchvision/resnet50", "timm/resnet18", "tico/resnet18-w16"]),
        ("evaluations", ["knn", "linear", "rankme"]),
        ("exporting", ["timm", "torchvision"]),
    ],
)
def test_every_catalogue_is_listed(tico, what, expected):
    names = [line.split()[0] for line in tico("list", what).splitlines() if line.strip()]
    assert set(expected) <= set(names)
    assert len(names) == len(set(names))


def test_entries_say_what_they_are(tico):
    for what in ("recipes", "methods", "evaluations", "exporting"):
        for line in tico("list", what).splitlines():
            assert len(line.split()) > 2, line


def test_everything_is_listed(tico):
    text = tico("list")
    for what in CATALOGUES:
        assert what in text.splitlines()
    assert "imagenet/tico" in text
    assert len(text.splitlines()) < 150  # of a thousand backbones only how to see them


def test_a_list_can_be_searched(tico):
    names = tico("list", "backbones", "convnext_at").split()
    assert "timm/convnext_atto" in names
    assert all("convnext_at" in name for name in names)


def test_an_unknown_list_names_the_nearest():
    assert "did you mean 'recipes'" in error_of("list", "recipe")
    assert "backbones" in error_of("list", "qqq")


@pytest.mark.parametrize("name", packaged_recipes())
def test_describe_prints_a_recipe(tico, name):
    assert load_recipe(parse_yaml(tico("describe", name), "output")) == load_recipe(name)


def test_describe_with_changes(tico):
    text = tico("describe", "demo", "training.epochs=3", "views.*.blur=0.5")
    expected = load_recipe("demo", {"training.epochs": 3, "views.*.blur": 0.5})
    assert load_recipe(parse_yaml(text, "output")) == expected


# ---------------------------------------------------------------------------------------------------- mistakes


def test_an_unknown_recipe():
    assert "did you mean 'demo'" in error_of("pretrain", "demmo")
    assert "did you mean 'demo'" in error_of("describe", "demmo")
    assert "did you mean 'cifar10/byol' or 'imagenet/byol'" in error_of("describe", "byol")
    assert "mine.yaml" in error_of("pretrain", "mine.yaml")


@pytest.mark.parametrize("verb", ["pretrain", "describe"])
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("method.roh=3", "did you mean 'rho'"),
        ("training.epochs=many", "'training.epochs'"),
        ("views.7.blur=1", "views.7.blur"),
        ("training.epochs=[", "YAML"),
        ("=3", "key=value"),
    ],
)
def test_a_bad_override(here, verb, word, expected):
    assert expected in error_of(verb, "demo", word)
    assert list(here.iterdir()) == []


def test_two_recipes():
    assert "one recipe" in error_of("pretrain", "demo", "imagenet/tico")


def test_resume_and_overwrite_exclude_each_other(here):
    assert "exclude each other" in error_of("pretrain", "demo", "--resume", "--overwrite")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("data", ["cifar", "nowhere/at/all"])
def test_data_that_are_not_there_can_be_put_right(here, images, data, tico):
    """The first attempt names the data; the second, put right, is not refused because of the first."""
    assert data in error_of("pretrain", "demo", *TINY, "--data", data, "--out", "run")
    tico("pretrain", "demo", *TINY, "--data", images, "--out", "run")
    assert (here / "run" / "checkpoints" / "backbone.safetensors").is_file()


def test_a_batch_that_is_too_large(here, images):
    line = error_of("pretrain", "demo", *TINY, "training.batch_size=64", "--data", images, "--out", "run")
    assert "training.batch_size 64" in line
    assert "12 images" in line


def test_a_folder_that_is_taken(here, run, images):
    words = ["pretrain", "demo", *TINY, "--data", images]
    line = error_of(*words, "--out", run)
    assert "--resume" in line
    assert "--overwrite" in line
    assert "another recipe" in error_of(*words, "--out", run, "--resume")
    assert "not a run folder" in error_of(*words, "--out", images, "--overwrite")
    assert (here / images / "a" / "0.png").is_file()


@pytest.mark.parametrize("out", ["notes.txt", "notes.txt/run"])
def test_an_output_that_cannot_be_a_folder(here, out):
    (here / "notes.txt").write_text("hello")
    assert "notes.txt" in error_of("pretrain", "demo", *TINY, "data.limit=8", "--out", out)
    assert (here / "notes.txt").read_text() == "hello"


@pytest.mark.parametrize("words", [["evaluate", "{}", "rankme"], ["embed", "{}"], ["export", "{}", "timm"]])
def test_a_folder_that_is_no_run(here, words):
    (here / "empty").mkdir()
    for name in ("empty", "nowhere"):
        assert name in error_of(*(word.format(name) for word in words))


def test_an_unknown_protocol_is_said_before_anything_else(here):
    assert "did you mean 'linear'" in error_of("evaluate", "nowhere", "liner")
    assert "did you mean 'knn'" in error_of("evaluate", "nowhere", "rankme", "kn")


@pytest.mark.parametrize("protocol", ["os.path", ".knn"])
def test_a_protocol_elsewhere_that_is_none(run, protocol):
    assert protocol in error_of("evaluate", run, protocol)


def test_a_protocol_that_needs_labels(here, run):
    (here / "flat").mkdir()
    for number, file in enumerate(sorted((here / "photos").rglob("*.png"))):
        file.rename(here / "flat" / f"{number}.png")
    assert "needs labels" in error_of("evaluate", run, "knn", "--data", "flat")


@pytest.mark.parametrize(
    "words", [["embed", "{}", "--out", "notes.txt/f.npz"], ["export", "{}", "timm", "--out", "notes.txt/b.pth"]]
)
def test_a_file_below_a_file_cannot_be_written(here, run, words):
    (here / "notes.txt").write_text("hello")
    assert "notes.txt" in error_of(*(word.format(run) for word in words))


def test_a_device_that_does_not_exist(here, monkeypatch):
    monkeypatch.setenv("TICO_DEVICE", "gpu")
    assert "gpu" in error_of("pretrain", "demo", *TINY, "data.limit=8")


def test_features_in_an_unknown_format(run):
    line = error_of("embed", run, "--out", "features.xyz")
    assert "features.xyz" in line
    assert ".npz" in line


def test_an_unknown_export_format(run):
    assert "did you mean 'torchvision'" in error_of("export", run, "torchvison")


def test_an_export_for_the_wrong_library(here, run):
    assert "tico/resnet10-w2" in error_of("export", run, "timm")
    assert not (here / "backbone.pth").exists()


# ---------------------------------------------------------------------------------------------------- what works


def test_embed_writes_features_with_names_and_labels(here, run, tico):
    assert "f.npz" in tico("embed", run, "--out", "deep/f.npz")
    with np.load(here / "deep" / "f.npz") as table:
        assert table["features"].shape == (12, load_backbone(run).width)
        assert table["names"].tolist() == [f"{name}/{number}.png" for name in "abc" for number in range(4)]
        assert table["labels"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    tico("embed", run, "--out", "f.csv")
    header, *rows = (here / "f.csv").read_text().splitlines()
    assert header.startswith("path,split,label,class,feature_0,")
    assert len(rows) == 12
    assert rows[0].startswith("a/0.png,train,0,a,")


def test_evaluate_says_what_it_wrote(here, run, tico):
    text = tico("evaluate", run, "rankme")
    assert "results.jsonl" in text
    assert "load_backbone('run')" in text
    assert len((here / "run" / "results.jsonl").read_text().splitlines()) == 1


def test_evaluate_on_images_that_leave_one_over(here, run, tico):
    """A last batch of a single image has no variance."""
    images = np.random.default_rng(0).integers(0, 256, (257, 8, 8, 3), dtype=np.uint8)
    np.savez(here / "x.npz", x_train=images, x_test=images[:9])
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2"), 8), here / "small.safetensors")
    assert "rankme" in tico("evaluate", "small.safetensors", "rankme", "--data", "x.npz")


def test_pretrain_ends_with_what_to_do_next(here, images, tico):
    text = tico("pretrain", "demo", *TINY, "--data", images, "--out", "a run ü")
    assert "tico evaluate" in text
    assert load_backbone("a run ü").width == 16
    assert (here / "a run ü" / "views.png").is_file()


# ---------------------------------------------------------------------------------------------------- as a process


def main_with(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """What a process would leave behind: its exit code, its output and its errors."""
    monkeypatch.setattr(sys, "argv", ["tico", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize("words", [["pretrian"], ["pretrain", "--otu", "x"], ["evaluate", "run"], ["describe"]])
def test_a_command_line_that_cannot_be_read_is_exit_code_two(monkeypatch, capsys, words):
    code, output, errors = main_with(monkeypatch, capsys, *words)
    assert code == 2
    assert output == ""
    assert "Error: " in errors
    assert "Traceback" not in errors


def test_success_is_exit_code_zero(monkeypatch, capsys):
    code, output, errors = main_with(monkeypatch, capsys, "describe", "demo")
    assert (code, errors) == (0, "")
    assert f"epochs: {load_recipe('demo').training.epochs} " in output


def shell(command: str, folder) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )


def test_a_real_process_says_one_line_too(tmp_path):
    result = shell(f"{sys.executable} -m tico_ssl pretrain demo method.roh=3", tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "did you mean 'rho'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_lacks_a_letter_shows_its_number(tmp_path):
    (tmp_path / "写真").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "写真" / "1.png")
    result = shell(f"PYTHONIOENCODING=ascii {sys.executable} -m tico_ssl data check 写真", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert r"\u5199\u771f" in result.stdout


def test_a_closed_pipe_is_no_error(tmp_path):
    result = shell(f"{sys.executable} -m tico_ssl list backbones | head -1", tmp_path)
    assert result.stdout.strip()
    assert result.stderr == ""
