"""What a network leaves out at random in training: dropout, drop path and the like of torch, torchvision and timm."""

from torch import nn

ANYWHERE = ("dropout", "attention_dropout", "drop_rate", "drop_prob")  # attributes that are rates in every module
OF_DROPPING = ("p", "prob")  # in modules that do nothing but drop


def drop_rates(module: nn.Module) -> list[str]:
    """The attributes of a module, without its children, that are rates of dropping above zero."""
    kind = type(module).__name__
    names = ANYWHERE + (OF_DROPPING if "Drop" in kind or kind == "StochasticDepth" else ())
    rates = ((name, getattr(module, name, None)) for name in names)
    return [name for name, rate in rates if isinstance(rate, float | int) and rate > 0]


def drops(network: nn.Module) -> bool:
    """Whether the network's output in training depends on random numbers."""
    return any(drop_rates(module) for module in network.modules())


def drop_nothing(network: nn.Module) -> None:
    """Set all rates of dropping to zero."""
    for module in network.modules():
        for name in drop_rates(module):
            setattr(module, name, 0.0)
