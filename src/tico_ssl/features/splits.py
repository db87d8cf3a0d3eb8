"""Training and test split of labelled images."""

from tico_ssl.data.held_out import held_out
from tico_ssl.data.source import Source
from tico_ssl.runtime.randomness import generator

HELD_OUT = 0.2  # fraction of labelled images, where the data have no test split
DRAWN = f"{HELD_OUT:.0%} held out by seed "  # how a split is described that the data do not have


def splits(train: Source, test: Source | None, seed: int, held: float = 0.0) -> tuple[Source, Source, str]:
    """Training and test images, and how they were chosen: the data's own split, or held out within every class. `held`
    is the fraction of the training images that the recipe holds out to be tested by."""
    if test is not None:
        return train, test, f"{held:.0%} of the training images, held out of pretraining" if held else "the data's own"
    left, out = held_out(train, HELD_OUT, generator(seed, "split"))
    return left, out, f"{DRAWN}{seed}"
