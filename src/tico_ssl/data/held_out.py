"""Images that are held out of others, the same fraction of every class."""

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.runtime.errors import UserError


def held_out(source: Source, fraction: float, generator: torch.Generator) -> tuple[Source, Source]:
    """The images that are left, and those held out: a fraction of every class, at least one image of each, but never
    all: a class of a single image could not be recognised in the test. Images with several classes or none are held out
    from the whole."""
    order = torch.randperm(len(source), generator=generator)
    out = torch.zeros(len(source), dtype=torch.bool)
    labels = _classes(source)
    for label in labels.unique():
        members = order[labels[order] == label]
        out[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    left, rest = (~out).nonzero().ravel(), out.nonzero().ravel()
    if len(rest) == 0:
        raise UserError(f"{source.name}: too few images to hold some out for a test")
    return source.subset(left), source.subset(rest)


def _classes(source: Source) -> Tensor:
    labels = source.labels
    return labels if labels is not None and labels.ndim == 1 else torch.zeros(len(source), dtype=torch.int64)
