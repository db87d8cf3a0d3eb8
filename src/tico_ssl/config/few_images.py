"""A recipe on few images: an epoch of a few hundred is one step or two, and its number of epochs no training.

So `training.least_steps` asks for smaller batches, and then for more epochs. Everything that is counted in epochs grows
with them, so the schedule keeps its shape.
"""

import math

from tico_ssl.config.recipe import Recipe
from tico_ssl.runtime.wording import counted

STEPS_PER_EPOCH = 4  # that smaller batches are to give
SMALLEST_BATCH = 32  # that is taken for their sake


def adapted(recipe: Recipe, images: int, processes: int = 1) -> Recipe:
    """The recipe with the batch, the epochs, the warm-up and the kNN interval that suit so many images, if its own make
    fewer steps than it asks for."""
    training = recipe.training
    if images // training.batch_size * training.epochs >= training.least_steps:
        return recipe
    batch = _batch(training.batch_size, images, processes * training.parts)
    if batch == 0:
        return recipe  # which says that there are too few
    epochs = max(training.epochs, math.ceil(training.least_steps / (images // batch)))
    times = epochs / training.epochs
    every = round(training.knn_every_epochs * times)
    return _with_lengths(recipe, batch, epochs, every, recipe.optimizer.warmup_epochs * times)


def as_adapted(recipe: Recipe, begun: Recipe) -> Recipe:
    """The recipe with the lengths of one that was adapted to the same images before."""
    training = begun.training
    every = training.knn_every_epochs
    return _with_lengths(recipe, training.batch_size, training.epochs, every, begun.optimizer.warmup_epochs)


def _with_lengths(recipe: Recipe, batch: int, epochs: int, knn_every: int, warmup: float) -> Recipe:
    lengths = {"batch_size": batch, "epochs": epochs, "knn_every_epochs": knn_every}
    return recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update=lengths),
            "optimizer": recipe.optimizer.model_copy(update={"warmup_epochs": warmup}),
        }
    )


def _batch(batch: int, images: int, shares: int) -> int:
    """The largest half, quarter or smaller part of a batch that leaves enough steps in an epoch, as long as it is not
    too small itself, in equal shares. 0 if a share would be less than two images."""
    while batch > images or (batch >= 2 * SMALLEST_BATCH and images // batch < STEPS_PER_EPOCH):
        batch //= 2
    batch = max(batch, min(2 * shares, images))
    return batch - batch % shares if batch >= 2 * shares else 0


def difference(asked: Recipe, recipe: Recipe) -> str:
    """What was adapted, in words; empty if nothing was."""
    before, now = asked.training, recipe.training
    if (before.batch_size, before.epochs) == (now.batch_size, now.epochs):
        return ""
    batch = f"batches of {now.batch_size} instead of {before.batch_size}"
    epochs = f"{counted(now.epochs, 'epoch')} instead of {before.epochs:,}"
    changed = [batch] * (now.batch_size != before.batch_size) + [epochs] * (now.epochs != before.epochs)
    return f"few images: {' and '.join(changed)}, for {counted(before.least_steps, 'step')} (training.least_steps)"
