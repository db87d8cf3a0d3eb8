"""Activation checkpointing: activations are recomputed in the backward pass, for less memory and a quarter more time.

Only the input of each residual or transformer block is stored. The recomputation gives the same values and does not
update BatchNorm's running statistics again.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tico_ssl.networks.batch_norm import kept_statistics
from tico_ssl.networks.blocks import residual_blocks, transformer_blocks
from tico_ssl.networks.dropping import drops
from tico_ssl.runtime.errors import UserError


def recompute_blocks(network: nn.Module) -> nn.Module:
    """Apply activation checkpointing to every block of a network, in place."""
    kinds = residual_blocks() + transformer_blocks()
    blocks = [module for module in network.modules() if isinstance(module, kinds)]
    if not blocks:
        raise UserError("training.recompute needs a network of residual or transformer blocks")
    for block in blocks:
        block.forward = MethodType(_forgetful(type(block).forward), block)
    return network


def _forgetful(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(block: nn.Module, *inputs: Any) -> Any:
        return checkpoint(
            forward,
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=block.training and drops(block),  # it drops the same again
            context_fn=lambda: (nullcontext(), kept_statistics(block)),
        )

    return run
