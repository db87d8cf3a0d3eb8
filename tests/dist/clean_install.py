"""The sdist and the wheel, each installed into an environment of its own and used outside the repository
(`make test-dist`; needs the network)."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tiny import TINY

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tico_ssl"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
SDIST = ROOT / "dist" / f"tico_ssl-{VERSION}.tar.gz"
WHEEL = ROOT / "dist" / f"tico_ssl-{VERSION}-py3-none-any.whl"
SMALL = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]


def files_of_the_package():
    """All but compiled ones, relative to the folder above."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def run(*command, cwd):
    """What a command prints; nothing of this repository is on its path."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "COLUMNS")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment["TICO_CACHE"] = str(cwd / "cache")
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=[SDIST, WHEEL], ids=["sdist", "wheel"])
def clean(request, tmp_path_factory):
    """A folder outside the repository, with an environment that has the package and what it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "environment", cwd=folder)
    constraints = ["--constraint", ROOT / "constraints.txt"]
    run("environment/bin/python", "-m", "pip", "install", "--quiet", *constraints, request.param, cwd=folder)
    return folder


def tico(folder, *words):
    return run(folder / "environment" / "bin" / "tico", *words, cwd=folder)


def test_the_wheel_has_every_file_of_the_package():
    with zipfile.ZipFile(WHEEL) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if name.startswith("tico_ssl/")} == files_of_the_package()
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_sdist_has_the_package_and_what_it_is_built_from():
    with tarfile.open(SDIST) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in files_of_the_package()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"} <= names
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/")) for name in names)


def test_the_package_is_that_of_the_environment(clean):
    where = run("environment/bin/python", "-c", "import tico_ssl; print(tico_ssl.__file__)", cwd=clean).strip()
    assert Path(where).is_relative_to(clean)
    assert tico(clean, "--version").strip() == f"tico-ssl {VERSION}"
    assert "training can run here" in tico(clean, "doctor")


def test_a_run_is_trained_evaluated_reported_and_exported(clean):
    tico(clean, "pretrain", "demo", *SMALL)
    assert "knn" in tico(clean, "evaluate", "runs/demo", "knn")
    tico(clean, "report", "runs/demo", "--points", "20")
    assert (clean / "runs" / "demo" / "report.html").stat().st_size > 1_000_000  # Plotly, the style and the script
    tico(clean, "export", "runs/demo", "safetensors", "--out", "backbone.safetensors")
    program = "from tico_ssl import load_backbone; print(load_backbone('backbone.safetensors').width)"
    assert int(run("environment/bin/python", "-c", program, cwd=clean)) > 0


def test_recipes_studies_and_policies_come_with_it(clean):
    for what, name in (("recipes", "imagenet/tico"), ("studies", "methods-cifar10"), ("views", "byol")):
        assert f"  {name} " in tico(clean, "list", what)
