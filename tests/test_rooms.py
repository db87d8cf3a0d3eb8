"""The plan of the house: rooms import from rooms below them alone, no modules import each other in a circle, and the
part that reads and checks needs no torch."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tico_ssl
from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe, packaged_recipes
from tico_ssl.results.metrics import declared
from tico_ssl.results.run_folder import Run, create_run
from tico_ssl.runtime.files import digest
from tico_ssl.runtime.json_lines import append_json_line

ROOT = Path(tico_ssl.__file__).parent

# From the ground up: a room may import from those before it, and from itself.
ROOMS = (
    "runtime",
    "config",
    "results",
    "data",
    "views",
    "optim",
    "networks",
    "pipeline",
    "methods",
    "features",
    "training",
    "evaluations",
    "bench",
    "studies",
    "report",
    "classifying",
    "exporting",
    "looking_up",
    "integrations",
)
ABOVE = {"", "__main__", "cli", "listing", "theory"}  # what stands beside the rooms

HEAVY = ("torch", "torchvision", "timm", "sklearn", "matplotlib", "tensorboard")


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


FILES = {module_name(file): file for file in ROOT.rglob("*.py")}


def imported(tree: ast.AST) -> set[str]:
    """Modules of the package that a module imports, anywhere in it, except for types alone."""
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tico_ssl":
            assert node.level == 0
            home = node.module.removeprefix("tico_ssl").removeprefix(".")
            for alias in node.names:
                inner = f"{home}.{alias.name}".removeprefix(".")
                found.add(inner if inner in FILES else home)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("tico_ssl.") for alias in node.names if alias.name.startswith("tico_ssl.")
            }
    return found


IMPORTS = {name: imported(ast.parse(file.read_text(encoding="utf-8"))) for name, file in FILES.items()}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_every_module_has_its_room():
    assert {room(name) for name in FILES} - set(ROOMS) == ABOVE


def test_rooms_import_from_rooms_below():
    upward = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        if room(name) in ROOMS
        for other in others
        if room(other) not in ROOMS[: ROOMS.index(room(name)) + 1]
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: others - {name} for name, others in IMPORTS.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def loaded_after(code: str) -> list[str]:
    """The heavy libraries that a process has imported after some code."""
    code += f"\nimport sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_recipes_catalogues_and_records_need_no_torch():
    light = [name for name in FILES if room(name) in ("config", "results", "report")]
    assert loaded_after("\n".join(f"import tico_ssl.{name}" for name in light)) == []
    everything = """
from tico_ssl.config import catalogue, recipe, study
for name in recipe.packaged_recipes():
    recipe.load_recipe(name)
for name in study.packaged_studies():
    study.check(loaded := study.load_study(name), study.expand(loaded))
for kind in catalogue.KINDS:
    for name in catalogue.entries(kind):
        catalogue.summary(kind, name)
for kind in ("methods", "evaluations"):
    for name in catalogue.entries(kind):
        catalogue.declaration(kind, name, "Config")
"""
    assert loaded_after(everything) == []


def test_losses_methods_and_optimisers_need_no_library_of_backbones():
    everything = """
from tico_ssl import LARS, TiCo, TiCoLoss, tico_loss
from tico_ssl.config import catalogue
for name in catalogue.entries("methods"):
    catalogue.load("methods", name)
"""
    assert loaded_after(everything) == ["torch"]


@pytest.fixture
def finished(tmp_path):
    """The folder of a run that was trained and evaluated, with what is read of it."""
    run = Run(tmp_path / "run")
    create_run(run.folder, load_recipe("demo", {"training.epochs": 1}), overwrite=False)
    line = {"step": 10, "epoch": 1.0, "loss": 1.0, "mean_cosine": 0.1, "images_per_second": 100.0, "seconds": 1.0}
    append_json_line(run.metrics_file, line)
    run.backbone_file.write_bytes(b"weights")
    numbers = {"trained": {"top1_k20": 60.0}, "untrained": {"top1_k20": 20.0}}
    made = {"protocol": "knn", "settings": {}, "data": {}, "checkpoint": digest(run.backbone_file), "seed": 0}
    append_json_line(run.results_file, made | {"numbers": numbers, "seconds": 1.0})
    return run.folder


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("compare", "RUN"), []),
        (("compare", "RUN", "--format", "latex"), []),
        (("report", "RUN", "--points", "0"), ["matplotlib"]),  # which draws figures/
        (("report", "RUN", "RUN", "--out", "RUN/both"), ["matplotlib"]),
    ],
)
def test_reading_runs_needs_no_torch(finished, words, heavy):
    words = [word.replace("RUN", str(finished)) for word in words]
    code = f"import sys; from tico_ssl.cli import app; sys.argv[1:] = {words!r}; app(standalone_mode=False)"
    assert loaded_after(code) == heavy


def test_metrics_of_every_protocol_are_declared_and_read_without_torch():
    declarations = """
from tico_ssl.config import catalogue
from tico_ssl.results.metrics import declared
for name in catalogue.entries("evaluations"):
    assert declared(name), name
"""
    assert loaded_after(declarations) == []
    for name in catalogue.entries("evaluations"):
        assert declared(name) == catalogue.load("evaluations", name).METRICS


@pytest.mark.parametrize("kind", ["methods", "evaluations"])
def test_settings_that_are_read_alone_are_those_of_the_module(kind):
    for name in catalogue.entries(kind):
        module = catalogue.load(kind, name)
        alone = catalogue._read(Path(module.__file__), module.__name__, "Config")
        assert alone is not module.Config or kind == "evaluations"
        assert alone.model_json_schema() == module.Config.model_json_schema()
        assert {key: field.description for key, field in alone.model_fields.items()} == {
            key: field.description for key, field in module.Config.model_fields.items()
        }


def test_names_that_begin_with_an_underscore_are_no_entries():
    assert not [name for kind in catalogue.KINDS for name in catalogue.entries(kind) if name.startswith(("_", "-"))]
    assert "tico" in catalogue.entries("methods") and len(packaged_recipes()) > 20
