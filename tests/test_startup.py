"""What answers at once: commands that read and list, and mistakes, are over before torch is imported. And importing the
package changes nothing outside it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_rooms import HEAVY

LIGHT = [
    ["--help"],
    ["pretrain", "--help"],
    ["replay", "--help"],
    ["doctor", "--help"],
    ["list"],
    *(["list", what] for what in ("recipes", "studies", "methods", "views", "data", "evaluations", "exporting")),
    ["describe", "cifar10/tico"],
    ["describe", "photos"],
    ["describe", "cifar10/tico", "method=simclr"],
    ["describe", "methods-cifar10"],
    ["study", "methods-textures", "--dry-run"],
    ["cache"],
]

# A command, and what its one line names. `run` is a run folder, `taken` holds a file, `notes.txt` is one.
MISTAKES = [
    ("pretrain nosuch", "nosuch"),
    ("pretrain nosuch.yaml", "nosuch.yaml"),
    ("pretrain demo imagenet/tico", "one recipe"),
    ("pretrain demo method.roh=3", "did you mean 'rho'"),
    ("pretrain demo training.epochs=many", "training.epochs"),
    ("pretrain demo training.epochs=[", "YAML"),
    ("pretrain demo method=ticco", "did you mean 'tico'"),
    ("pretrain demo --data nowhere/at/all", "nowhere/at/all"),
    ("pretrain demo --data cifar", "did you mean 'cifar10'"),
    ("pretrain demo data.source=nowhere", "nowhere"),
    ("pretrain photos", "--data"),
    ("plan photos", "--images"),
    ("plan imagenet/tico --gpu h300", "h200"),
    ("pretrain demo --out taken", "not a run folder"),
    ("pretrain demo --out taken --overwrite", "not a run folder"),
    ("pretrain demo --out notes.txt", "notes.txt"),
    ("pretrain demo --out run --resume", "another recipe"),
    ("pretrain demo --resume --overwrite", "exclude each other"),
    ("pretrain demo optimizer.warmup_epochs=1e308", "optimizer.warmup_epochs"),
    ("pretrain demo training.epochs=10000000000", "training.epochs"),
    ("pretrain demo optimizer.lr=1e39", "optimizer.lr"),
    ("pretrain demo optimizer.weight_decay=1e308", "optimizer.weight_decay"),
    ("pretrain demo training.batch_size=32 training.parts=32", "at most 16"),
    ("pretrain cifar10/moco training.batch_size=96 method.queue=96", "method.bn_splits 8: 96 images at once"),
    ("pretrain cifar10/moco training.parts=16", "method.bn_splits 8"),
    ("pretrain cifar10/moco training.batch_size=192", "method.queue 4096 is not a multiple of the 192 keys"),
    ("pretrain demo method=squared-contrastive method.bank=100", "method.bank 100"),
    ("pretrain cifar10/swav training.batch_size=4000", "method.queue 3840 is shorter"),
    ("pretrain demo method=pirl", "a jigsaw of 9 pieces: views=pirl"),
    ("pretrain demo method=pirl views=pirl method.pieces=4", "a jigsaw of 4 pieces"),
    ("pretrain demo views=pirl", "view 2 of 'views' is a jigsaw"),
    ("pretrain cifar10/swav-multicrop views.2.jigsaw=2", "view 3 of 'views' is a jigsaw"),
    ("pretrain demo method=byol views=[{}]", "method byol needs 2 views, 'views' makes 1"),
    ("pretrain demo method.view_order=alternate views.1.size=16", "two views of the same size"),
    ("pretrain demo views.1.count=1000000000", "views.1.count"),
    ("pretrain demo --find-batch method.roh=3", "did you mean 'rho'"),
    ("pretrain demo --slurm partion=gpu", "did you mean 'partition'"),
    ("study methods-textures --slurm gpus=8", "one process"),
    ("replay nowhere", "nowhere"),
    ("cache --limit much", "20G"),
    ("replay run", "nothing to replay"),
    ("evaluate run nosuch", "nosuch"),
    ("evaluate run knn few-shot.shots=5", "shots"),
    ("evaluate run knn nosuch=5", "nosuch"),
    ("evaluate run linear iterations=0", "iterations"),
    ("evaluate run fine-tune --quick", "quick look"),
    ("evaluate nowhere knn", "nowhere"),
    ("evaluate taken knn", "taken"),
    ("evaluate run knn --data nowhere", "nowhere"),
    ("evaluate tico/resnet10-w2 knn", "--data"),
    ("evaluate run knn --against nowhere", "nowhere"),
    ("evaluate run knn --against timm/resnet18=gone.pth", "gone.pth"),
    ("embed nowhere", "nowhere"),
    ("embed run --out features.xyz", "features.xyz"),
    ("embed run --data nowhere", "nowhere"),
    ("embed run --split training", "did you mean 'train'"),
    ("embed run --weights notes.txt", "--weights goes with"),
    ("embed torchvision/resnet18 --data textures --weights nowhere.pth", "nowhere.pth"),
    ("search run textures", "--query"),
    ("search run textures --query nowhere.png", "nowhere.png"),
    ("search run nowhere --query notes.txt", "nowhere"),
    ("search nowhere textures --query notes.txt", "nowhere"),
    ("search run textures --query notes.txt --out notes.txt", "--out takes a folder"),
    ("curate nowhere textures", "nowhere"),
    ("curate run nowhere", "nowhere"),
    ("curate run textures --out notes.txt", "--out takes a folder"),
    ("report run --out page.html", "--out takes a folder, in which the page is report.html"),
    ("curate run textures --threshold nan", "threshold"),
    ("export run nosuch", "nosuch"),
    ("export nowhere timm", "nowhere"),
    ("finetune nowhere --data textures", "nowhere"),
    ("finetune run head=liner", "did you mean 'linear'"),
    ("finetune run epochs=3", "epochs"),
    ("finetune run --data nowhere", "nowhere"),
    ("finetune run --out notes.txt", "notes.txt"),
    ("predict nowhere textures", "nowhere"),
    ("predict taken textures", "no classifier"),
    ("study nosuch", "nosuch"),
    ("study methods-textures nosuch=3", "nosuch"),
    ("study methods-textures --only nosuch", "nosuch"),
    ("data check nowhere", "nowhere"),
    ("data check textures --split vall", "did you mean 'val'"),
    ("data pack nowhere x.tico", "nowhere"),
    ("describe nosuch", "nosuch"),
    ("list nosuch", "nosuch"),
]

DRIVER = """
import contextlib, io, json, sys
from tico_ssl.cli import main
heavy, commands = json.load(sys.stdin)
for words in commands:
    said, complained, before, code = io.StringIO(), io.StringIO(), set(sys.modules), 0
    sys.argv = ["tico", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    loaded = [name for name in heavy if name in sys.modules and name not in before]
    print(json.dumps([code, said.getvalue(), complained.getvalue(), loaded]))
"""


def outcomes(commands: list[list[str]], folder: Path) -> list[tuple[int, str, str, list[str]]]:
    """Of commands in one new process: exit code, what was said and complained of, libraries that each loaded."""
    given = json.dumps([[*HEAVY, "numpy"], commands])
    done = subprocess.run([sys.executable, "-c", DRIVER], input=given, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run):
    """Where the commands are given."""
    here = tmp_path_factory.mktemp("here")
    shutil.copytree(run.folder, here / "run")
    (here / "taken").mkdir()
    for file in (here / "notes.txt", here / "taken" / "notes.txt"):
        file.write_text("hello")
    return here


def test_reading_and_listing_load_nothing_heavy(folder):
    for words, (code, said, complained, loaded) in zip(LIGHT, outcomes(LIGHT, folder), strict=True):
        assert (code, complained, loaded) == (0, "", []), words
        assert len(said.splitlines()) > 1


def test_mistakes_are_one_line_before_torch_is_imported(folder):
    before = sorted(folder.rglob("*"))
    commands = [command.split() for command, _ in MISTAKES]
    for (command, named), outcome in zip(MISTAKES, outcomes(commands, folder), strict=True):
        code, said, line, loaded = outcome
        assert (code, said) == (2, ""), command
        assert set(loaded) <= {"numpy"}, command
        assert line.startswith("error: ")
        assert line.endswith("\n")
        assert line.count("\n") == 1
        assert named in line
    assert sorted(folder.rglob("*")) == before


def test_python_refuses_the_same_without_torch(folder):
    code = """
import json, sys
import tico_ssl
from tico_ssl.runtime.errors import UserError
calls = [
    lambda: tico_ssl.pretrain("nosuch"),
    lambda: tico_ssl.pretrain("photos"),
    lambda: tico_ssl.pretrain("demo", resume=True, overwrite=True),
    lambda: tico_ssl.pretrain("demo", data=["textures", "nowhere"]),
    lambda: tico_ssl.evaluate("run", "nosuch"),
    lambda: tico_ssl.embed("run", out="features.xyz"),
    lambda: tico_ssl.export("run", "nosuch", "b.pth"),
    lambda: tico_ssl.study("nosuch"),
]
for call in calls:
    try:
        call()
    except UserError:
        continue
    raise AssertionError("not refused")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


def test_training_loads_no_library_that_it_does_not_use(folder):
    words = ["pretrain", "demo", "data.limit=16", "training.batch_size=8", "training.epochs=1"]
    words += ["training.knn_every_epochs=0", "backbone.name=tico/resnet10-w2", "method.hidden=8", "method.dim=4"]
    (code, _, complained, loaded) = outcomes([[*words, "--out", "new"]], folder)[0]
    shutil.rmtree(folder / "new")
    assert (code, complained) == (0, "")
    assert not {"timm", "sklearn", "matplotlib"} & set(loaded)


def test_importing_changes_nothing_outside_the_package():
    """Neither warnings nor torch's settings, the environment, signals or the states of random generators."""
    code = """
import contextlib, importlib, os, pkgutil, random, signal, sys, warnings
import numpy, scipy.optimize, sklearn.cluster, sklearn.manifold, sklearn.svm, timm, torch, torchvision
import torch.utils.tensorboard
with contextlib.suppress(ImportError):
    import lightning.pytorch
import tico_ssl

def state():
    return {
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "random": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "threads": torch.get_num_threads(),
        "precision": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "modes": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }

before = state()
for found in pkgutil.walk_packages(tico_ssl.__path__, "tico_ssl."):
    if not found.name.endswith("__main__") and (found.name.split(".")[-1] != "lightning" or "lightning" in sys.modules):
        importlib.import_module(found.name)
        after = state()
        assert after == before, (found.name, [key for key in before if after[key] != before[key]])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
