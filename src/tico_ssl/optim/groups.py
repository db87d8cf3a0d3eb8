"""Parameter groups, optimisers and learning rates, for pretraining and evaluations."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tico_ssl.config.sections import OptimizerConfig
from tico_ssl.optim.lars import LARS

KINDS: dict[str, Callable[..., Optimizer]] = {"lars": LARS, "sgd": SGD, "adamw": AdamW}
FORMS = ("fused", "foreach", "capturable")  # implementation of torch's optimisers; does not affect the result

Group = dict[str, Any]


def one_dimensional(parameter: Tensor) -> bool:
    """Whether a parameter is a bias, a scale or a shift."""
    return parameter.ndim <= 1


def decay_groups(
    parameters: Iterable[Tensor],
    weight_decay: float,
    lr_ratio: float = 1.0,
    plain_lr_ratio: float | None = None,
    is_plain: Callable[[Tensor], bool] = one_dimensional,
    decay_all: bool = False,
) -> list[Group]:
    """Two groups: parameters with weight decay, and plain ones without, unless all decay. `lr_ratio` multiplies the
    learning rate; plain parameters have the same ratio unless given."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    plain_ratio = lr_ratio if plain_lr_ratio is None else plain_lr_ratio
    groups: list[Group] = [
        {"params": [p for p in trained if not is_plain(p)], "weight_decay": weight_decay, "lr_ratio": lr_ratio},
        {
            "params": [p for p in trained if is_plain(p)],
            "weight_decay": weight_decay if decay_all else 0.0,
            "lr_ratio": plain_ratio,
        },
    ]
    return [group for group in groups if group["params"]]


def optimizer_of(kind: str, groups: list[Group], lr: float, **settings: Any) -> Optimizer:
    """An optimiser of groups, in the implementation that suits their device.

    On a GPU every group's learning rate is a tensor there, so that a captured step can change it, and torch's own
    optimisers use their fused implementation.
    """
    device = groups[0]["params"][0].device
    on_gpu = device.type == "cuda"
    form: dict[str, bool] = {}
    if kind != "lars":  # which has one implementation for all devices
        form = {"fused": True} if on_gpu else {"foreach": True}
    if kind == "adamw":
        form["capturable"] = on_gpu
    if on_gpu:
        groups = [group | {"lr": torch.tensor(lr, device=device)} for group in groups]
    return KINDS[kind](groups, lr=lr, **settings, **form)


def parameter_groups(model: nn.Module, config: OptimizerConfig, fixed_rate: Sequence[nn.Module] = ()) -> list[Group]:
    """The parameter groups of a recipe: all trainable parameters. Those of the modules in `fixed_rate` have groups of
    their own, which the schedule leaves alone."""
    fixed = {id(parameter) for module in fixed_rate for parameter in module.parameters()}

    def groups_of(parameters: Iterable[Tensor]) -> list[Group]:
        ratio, decay_all = config.one_dimensional_lr_ratio, config.decay_all
        return decay_groups(parameters, config.weight_decay, plain_lr_ratio=ratio, decay_all=decay_all)

    scheduled = groups_of(p for p in model.parameters() if id(p) not in fixed)
    constant = groups_of(p for p in model.parameters() if id(p) in fixed)
    return scheduled + [group | {"fixed_rate": True} for group in constant]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    peak_lr: float | None = None,
    fixed_rate: Sequence[nn.Module] = (),
) -> Optimizer:
    """The optimiser of a recipe. The modules in `fixed_rate` keep the peak learning rate, by default that of a batch of
    256."""
    settings: dict[str, dict[str, Any]] = {
        "lars": {
            "momentum": config.momentum,
            "trust_coefficient": config.trust_coefficient,
            "clip": config.clip_trust,
            "separate_norms": config.separate_norms,
            "adapt_all": config.adapt_all,
            "decay_all": config.decay_all,
        },
        "sgd": {"momentum": config.momentum, "nesterov": config.nesterov},
        "adamw": {"betas": config.betas},
    }
    groups = parameter_groups(model, config, fixed_rate)
    lr = config.lr if peak_lr is None else peak_lr
    optimizer = optimizer_of(config.name, groups, lr, **settings[config.name])
    for group in optimizer.param_groups:
        _set_rate(group, lr)
    return optimizer


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of this step in every group that follows the schedule."""
    for group in optimizer.param_groups:
        if not group.get("fixed_rate"):
            _set_rate(group, lr)


def _set_rate(group: Group, lr: float) -> None:
    value = lr * group.get("lr_ratio", 1.0)
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state from any kind of device: the type of the learning rate and the implementation stay those of
    this device."""
    kept = [{key: group[key] for key in ("lr", *FORMS) if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, mine in zip(optimizer.param_groups, kept, strict=True):
        group |= mine
