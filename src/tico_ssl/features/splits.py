"""Training and test split of labelled images."""

import torch

from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator

HELD_OUT = 0.2  # fraction of labelled images, where the data have no test split


def splits(train: Source, test: Source | None, seed: int) -> tuple[Source, Source, str]:
    """Training and test images, and how they were chosen: the data's own split, or held out within every class.

    Images with several classes or none are held out from the whole.
    """
    if test is not None:
        return train, test, "the data's own"
    order = torch.randperm(len(train), generator=generator(seed, "split"))
    held_out = torch.zeros(len(train), dtype=torch.bool)
    labels = train.labels
    if labels is None or labels.ndim != 1:
        labels = torch.zeros(len(train), dtype=torch.int64)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: max(1, round(HELD_OUT * len(members)))]] = True
    kept, out = (~held_out).nonzero().ravel(), held_out.nonzero().ravel()
    if len(kept) == 0:
        raise UserError(f"{train.name}: too few images to hold some out for a test")
    how = f"{HELD_OUT:.0%} held out by seed {seed}, seen without labels in pretraining"
    return train.subset(kept), train.subset(out), how
