"""The head that training uses and evaluation throws away."""

from torch import nn


def projector(width: int, hidden: int, dim: int, last_bias: bool = False) -> nn.Sequential:
    """Linear, BatchNorm, ReLU, Linear. The first layer needs no bias: the BatchNorm behind it has one."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, dim, bias=last_bias),
    )
