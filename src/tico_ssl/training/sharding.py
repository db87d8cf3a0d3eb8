"""Networks that are divided among processes (FSDP2): each keeps a share of weights, gradients, optimiser state and
target, and the blocks of a transformer are put together for the moment in which they compute.

A training is divided after its checkpoint was read and put together before one is written, so a checkpoint does not say
how it was made, and any number of processes continues it.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tico_ssl.config.recipe import Recipe
from tico_ssl.methods._base import Method
from tico_ssl.networks.blocks import transformer_blocks
from tico_ssl.networks.target import Target
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError


def is_divided(recipe: Recipe) -> bool:
    """Whether a training is divided here: if that is asked for, and there are several processes."""
    return recipe.training.sharded and distributed.active()


def check_sharded(recipe: Recipe, method: Method) -> None:
    """Refuse what cannot be divided."""
    if recipe.optimizer.name == "lars":
        raise UserError("training.sharded needs optimizer.name=adamw or sgd: LARS needs the norms of whole weights")
    if not any(isinstance(module, transformer_blocks()) for module in method.backbone.modules()):
        raise UserError(f"training.sharded needs a vision transformer, and {recipe.backbone.name} is none")
    own = [name for name, _ in method.named_parameters(recurse=False)]
    if recipe.training.clip_gradient is not None and own:
        raise UserError(f"training.sharded does not go with training.clip_gradient: {own[0]} is not divided")


class Whole:
    """A divided training in one piece, on the CPU: as it was when it was last put together."""

    def __init__(self, method: Method, optimizer: Optimizer) -> None:
        """Divide a training among the processes, in place. A collective call."""
        distributed.spread(method)
        self._method, self._optimizer = method, optimizer
        self.method, self.optimizer = copy.deepcopy((method, optimizer))
        self.method.cpu()
        whole = dict(method.named_parameters())
        _divide(method, next(method.parameters()).device)
        _follow(optimizer, {whole[name]: share for name, share in method.named_parameters()})

    @torch.no_grad()
    def put_together(self) -> None:
        """Collect all shares. A collective call."""
        divided = (*self._method.parameters(), *self._method.buffers())
        for mine, theirs in zip((*self.method.parameters(), *self.method.buffers()), divided, strict=True):
            mine.copy_(_whole(theirs))
        groups = zip(self.optimizer.param_groups, self._optimizer.param_groups, strict=True)
        for group, of_shares in groups:
            group |= {key: value for key, value in of_shares.items() if key != "params"}
            for whole, share in zip(group["params"], of_shares["params"], strict=True):
                kept = self._optimizer.state[share].items()
                self.optimizer.state[whole] = {key: _on_cpu(value) for key, value in kept}


def _divide(method: Method, device: torch.device) -> None:
    """Every module of the method is divided for itself, transformer blocks one by one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    children = [part for child in method.children() for part in (child if isinstance(child, Target) else [child])]
    for child in (child for child in children if any(True for _ in child.parameters())):
        for parameter in child.parameters():
            parameter.data = parameter.data.contiguous()  # shares have no other layout
        for module in child.modules():
            if isinstance(module, transformer_blocks()):
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
        # Also of the outermost module, or a target that has no backward pass would keep its weights of before
        fully_shard(child, mesh=mesh, reshard_after_forward=True)


def _follow(optimizer: Optimizer, shares: dict[Tensor, Tensor]) -> None:
    """Make an optimiser of whole parameters one of their shares."""
    state = {shares[whole]: kept for whole, kept in optimizer.state.items()}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [shares[whole] for whole in group["params"]]
    for share, kept in state.items():
        optimizer.state[share] = {key: _share(value, share) for key, value in kept.items()}


def _share(value: Any, like: Any) -> Any:
    """This process's share of what an optimiser keeps of a parameter; counters stay as they are."""
    from torch.distributed.tensor import distribute_tensor

    if not distributed.is_share(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.contiguous(), like.device_mesh, like.placements)


def _on_cpu(value: Any) -> Any:
    return _whole(value).cpu().clone() if isinstance(value, Tensor) else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if distributed.is_share(value) else value
