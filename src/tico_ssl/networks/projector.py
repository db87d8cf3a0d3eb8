"""Heads that are used in training and dropped in evaluation: projectors and predictors."""

from itertools import pairwise

from torch import nn


def head(
    *widths: int,
    norm: bool = True,
    last_bias: bool | None = None,
    last_norm: bool = False,
    last_affine: bool = True,
    last_norm_bias: bool = True,
) -> nn.Sequential:
    """Linear layers with BatchNorm (if `norm`) and ReLU between them; after the last, BatchNorm if `last_norm`.

    A layer before a BatchNorm needs no bias: the BatchNorm has one. Unless `last_bias` says otherwise, the last layer
    of a head with BatchNorm has none either. `last_affine` and `last_norm_bias` are of the last BatchNorm: without the
    latter its bias stays zero.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after, bias=not norm)]
        layers += [nn.BatchNorm1d(after)] if norm else []
        layers += [nn.ReLU(inplace=True)]
    layers += [nn.Linear(widths[-2], widths[-1], bias=not norm if last_bias is None else last_bias)]
    if last_norm:
        last = nn.BatchNorm1d(widths[-1], affine=last_affine)
        if last_affine and not last_norm_bias:
            last.bias.requires_grad_(False)
        layers += [last]
    return nn.Sequential(*layers)
