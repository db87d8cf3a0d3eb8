"""Training and test split of labelled images."""

from typing import NamedTuple

from tico_ssl.data.held_out import held_out
from tico_ssl.data.source import Source
from tico_ssl.runtime.randomness import generator

HELD_OUT = 0.2  # fraction of labelled images, where the data have no test split


class Splits(NamedTuple):
    """Training and test images, how they were chosen, and whether the test images are `drawn` from those to train on,
    for lack of others."""

    train: Source
    test: Source
    how: str
    drawn: bool


def splits(train: Source, test: Source | None, seed: int, held: float = 0.0) -> Splits:
    """Training and test images, and how they were chosen: the data's own split, or held out within every class. `held`
    is the fraction of the training images that the recipe holds out to be tested by."""
    if test is not None:
        how = f"{held:.0%} of the training images, held out of pretraining" if held else "the data's own"
        return Splits(train, test, how, drawn=False)
    left, out = held_out(train, HELD_OUT, generator(seed, "split"))
    return Splits(left, out, f"{HELD_OUT:.0%} held out by seed {seed}", drawn=True)
