"""The stored runs behind docs/reproductions.md have the settings of the recipes that the page names."""

from pathlib import Path

import pytest
import yaml

from tico_ssl.config.recipe import dump_recipe, load_recipe

LOGS = Path(__file__).parents[1] / "benchmarks" / "logs" / "reproductions"
NAMES = {"simclr-solo-learn": "simclr"}
# What a run measures on the way and how often it is saved changes nothing that it learns; data lie where they lie.
BESIDE = {"log_every_steps", "knn_every_epochs", "knn_images", "checkpoint_seconds", "source", "root", "description"}
# Differences that the page tells.
TOLD = {
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
