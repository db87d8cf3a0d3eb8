"""A recipe on few images: smaller batches and more epochs make enough steps, and the schedule keeps its shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tico_ssl import pretrain
from tico_ssl.config.few_images import SMALLEST_BATCH, STEPS_PER_EPOCH, adapted, difference
from tico_ssl.config.recipe import load_recipe
from tico_ssl.runtime.errors import UserError

PHOTOS = load_recipe("photos")
SMALL = {
    "data.image_size": 16,
    "backbone.name": "tico/resnet10-w4",
    "method.hidden": 16,
    "method.dim": 8,
    "training.workers": 1,
}


@given(
    images=st.integers(2, 100_000),
    batch=st.sampled_from([2, 48, 100, 256, 1024]),
    epochs=st.integers(1, 300),
    least=st.integers(0, 10_000),
    processes=st.integers(1, 4),
)
def test_there_are_enough_steps_of_the_same_schedule(images, batch, epochs, least, processes):
    lengths = {"batch_size": batch * processes, "epochs": epochs, "least_steps": least}
    asked = PHOTOS.model_copy(update={"training": PHOTOS.training.model_copy(update=lengths)})
    found = adapted(asked, images, processes)
    training = found.training
    if training.batch_size > images:
        assert found == asked and (least == 0 or images < 2 * processes)
        return
    assert images // training.batch_size * training.epochs >= least
    assert training.batch_size % processes == 0 and training.epochs >= epochs
    warmup = found.optimizer.warmup_epochs / training.epochs
    assert warmup == pytest.approx(asked.optimizer.warmup_epochs / epochs)
    assert adapted(found, images, processes) == found
    if images // asked.training.batch_size * epochs >= least:
        assert found == asked and difference(asked, found) == ""
    elif training.batch_size < asked.training.batch_size:  # not smaller than it has to be
        fewer = images // (2 * training.batch_size) < STEPS_PER_EPOCH
        assert fewer and (
            training.batch_size > SMALLEST_BATCH - processes or training.batch_size * 2 > images - 2 * processes
        )


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "knn"),
    [(6_552, 256, 200, 20), (2_000, 256, 715, 72), (500, 64, 715, 72), (100, 32, 1_667, 167), (20, 16, 5_000, 500)],
)
def test_the_recipe_for_photos(images, batch, epochs, knn):
    """The first are Flowers, on which the recipe was measured: nothing changes."""
    recipe = adapted(load_recipe("photos"), images)
    training = recipe.training
    assert (training.batch_size, training.epochs, training.knn_every_epochs) == (batch, epochs, knn)
    assert recipe.optimizer.warmup_epochs == pytest.approx(epochs / 20)
    assert adapted(load_recipe("photos-continue"), images).training.least_steps == 1_250


@pytest.mark.parametrize("given", [{"training.epochs": 3}, {"training.batch_size": 16}])
def test_whoever_gives_a_length_means_it(given, tmp_path):
    ((key, value),) = given.items()
    assert adapted(load_recipe("photos", given), 50) == load_recipe("photos", given)
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: photos\ntraining: {{{key.partition('.')[2]}: {value}}}\n")
    assert adapted(load_recipe(file), 50) == load_recipe(file)
    both = load_recipe("photos", given | {"training.least_steps": 1_000})
    assert adapted(both, 50) != both


def folder(root, count):
    root.mkdir()
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / f"{number}.png")
    return str(root)


def test_a_run_says_it_keeps_it_and_can_be_resumed_and_lengthened(tmp_path, capsys):
    data, out = folder(tmp_path / "few", 40), tmp_path / "run"
    given = SMALL | {"training.epochs": 2, "training.least_steps": 6}
    pretrain("photos", data, out, given)
    said = capsys.readouterr().out
    assert (
        "few images: batches of 32 instead of 256 and 6 epochs instead of 2, for 6 steps (training.least_steps)" in said
    )
    run = pretrain("photos", data, out, given, resume=True)
    assert "is complete: nothing to train" in capsys.readouterr().out
    assert (run.recipe().training.batch_size, run.recipe().training.epochs) == (32, 6)
    assert run.metrics()[-1]["step"] == 6
    with pytest.raises(UserError, match=r"training\.batch_size was 32, is 64"):
        pretrain("photos", data, out, given | {"training.batch_size": 64, "training.least_steps": 0}, resume=True)
    run = pretrain(run.recipe_file, None, out, {"training.epochs": 8}, resume=True)
    assert run.metrics()[-1]["step"] == 8
    again = pretrain(run.recipe_file, None, tmp_path / "again", {})
    assert again.metrics()[-1]["step"] == 8


def test_one_image_is_too_few(tmp_path):
    with pytest.raises(UserError, match="batch_size 256 is larger than the 1 image"):
        pretrain("photos", folder(tmp_path / "one", 1), tmp_path / "run", SMALL)
