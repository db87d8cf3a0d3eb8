"""Which parameter is trained how: the optimiser of a recipe, its groups, and setting the rate of a step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tico_ssl.config.sections import OptimizerConfig
from tico_ssl.optim.lars import LARS

FORMS = ("fused", "foreach", "capturable")  # how torch's optimisers go about it, with the same result


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, object]]:
    """Weights, and one-dimensional parameters, which have no decay. `lr_ratio` multiplies the step's rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay, "lr_ratio": 1.0},
        {
            "params": [p for p in trained if p.ndim <= 1],
            "weight_decay": 0.0,
            "lr_ratio": config.one_dimensional_lr_ratio,
        },
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser of a recipe over everything in the model that takes a gradient.

    On a GPU its learning rate is a tensor there, so that a recorded step can change it, and torch's own optimisers take
    their one-kernel form.
    """
    groups = parameter_groups(model, config)
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    lr: Any = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    form = {"fused": True} if on_gpu else {"foreach": True}
    if config.name == "lars":
        optimizer: Optimizer = LARS(
            groups,
            lr=lr,
            momentum=config.momentum,
            trust_coefficient=config.trust_coefficient,
            clip=config.clip_trust,
        )
    elif config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, **form)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, capturable=on_gpu, **form)
    for group in optimizer.param_groups if on_gpu else []:
        group["lr"] = lr.clone()  # one for each group, whose ratios differ
    return optimizer


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the rate of this step in every group."""
    for group in optimizer.param_groups:
        value = lr * group.get("lr_ratio", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put a saved state back, whatever kind of device it was saved on: how a rate is held and which form is taken are
    matters of this device."""
    kept = [{key: group[key] for key in ("lr", *FORMS) if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, mine in zip(optimizer.param_groups, kept, strict=True):
        group |= mine
