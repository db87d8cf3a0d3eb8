"""The stored runs behind docs/reproductions.md have the settings of the recipes that the page names, and what the
descriptions of recipes say was measured is in the logs that they name."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tico_ssl.config.recipe import dump_recipe, load_recipe, packaged_recipes

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "benchmarks" / "logs" / "reproductions"
NAMES = {"simclr-solo-learn": "simclr"}
# What a run measures on the way and how often it is saved changes nothing that it learns; data lie where they lie.
BESIDE = {"log_every_steps", "knn_every_epochs", "knn_images", "checkpoint_seconds", "source", "root", "description"}
# Differences that the page tells.
TOLD = {
    "byol-lightly": {"method.last_bias": False},
    "simclr-lightly": {"method.last_norm_bias": False},
    "simsiam-lightly": {"method.last_affine": False},
    "simsiam-lightly-init": {
        "method.name": "benchmarks.lightly_simsiam",
        "method.hidden_layers": 2,
        "method.last_affine": False,
        "method.default_init": True,
    },
    "simsiam-lightly-all": {
        "method.name": "benchmarks.lightly_simsiam",
        "method.hidden_layers": 2,
        "method.default_init": True,
        "method.stem_relu": False,  # without effect, as the page says
    },
}


def settings(recipe) -> dict[str, object]:
    """All settings as dotted keys, those that are given by default too."""
    values = yaml.safe_load(dump_recipe(recipe))
    return {key: value for key, value in flat(values) if key.rpartition(".")[-1] not in BESIDE}


def flat(values, path=""):
    if not isinstance(values, dict):
        yield path, values
        return
    for key, value in values.items():
        yield from flat(value, f"{path}.{key}" if path else key)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in LOGS.glob("*/recipe.yaml")))
def test_a_stored_run_has_the_settings_of_its_recipe(folder):
    run = settings(load_recipe(LOGS / folder / "recipe.yaml"))
    recipe = settings(load_recipe(f"cifar10/{NAMES.get(folder, folder.removesuffix('-init').removesuffix('-all'))}"))
    defaults = {"method.default_init": False, "method.stem_relu": True}  # of settings that the recipe's method lacks
    different = {key: value for key, value in run.items() if value != recipe.get(key, defaults.get(key))}
    assert different == TOLD.get(folder, {})


MEASURED = re.compile(r"Here: ([\d.]+) % (by kNN \(k 200\)|linear)(.*), (\d+) (seconds|minutes) on .*? \((\S+)\)\.$")
PROTOCOLS = {"by kNN (k 200)": ("knn", "top1_k200"), "linear": ("linear", "top1")}
IDLE = {"optimizer.scale_decay": False, "training.least_steps": 0}  # with so many images, in batches of 256
DIFFERENT = {  # from the recipe in the measured run, as its description tells
    "cifar10/byol-lightly": {"method.last_bias": False},
    "cifar10/simclr-lightly": {"method.last_norm_bias": False},
    "cifar10/tico": {"training.epochs": 60},
    "photos": {"data.image_size": 112, "optimizer.weight_decay": 5e-4} | IDLE,
    "photos-continue": {"training.init": "r/sup"} | IDLE,
}


def descriptions() -> dict[str, str]:
    """Those that say what was measured."""
    found = {name: load_recipe(name, {"data.source": "photos"}).description for name in packaged_recipes()}
    return {name: " ".join(text.split()) for name, text in found.items() if "Here:" in text}


@pytest.mark.parametrize("name", descriptions())
def test_what_a_recipe_says_was_measured_is_in_its_log(name):
    number, protocol, _, time, unit, log = MEASURED.search(descriptions()[name]).groups()
    folder, (evaluation, metric) = ROOT / log, PROTOCOLS[protocol]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    measured = next(one for one in results if one["protocol"] == evaluation)["numbers"]["trained"][metric]
    assert number == f"{measured:.{len(number.partition('.')[2])}f}"
    seconds = float(re.search(r"trained in ([\d,]+) s", (folder / "train.log").read_text())[1].replace(",", ""))
    assert int(time) == round(seconds / (60 if unit == "minutes" else 1))
    of_run, of_recipe = settings(load_recipe(folder / "recipe.yaml")), settings(load_recipe(name, {"data.source": "x"}))
    assert {key: value for key, value in of_run.items() if value != of_recipe[key]} == DIFFERENT.get(name, {})
