"""The target network of a run, from its checkpoint."""

from pathlib import Path

import torch

from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.target import Target
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.checkpoint import Damaged, read_checkpoint
from tico_ssl.training.setup import build_method


def load_target(folder: Path) -> Backbone:
    """The backbone of the target, in evaluation mode, weight standardisation folded into the weights."""
    run = Run(folder)
    recipe, file = run.recipe(), run.checkpoint_file
    method = build_method(recipe, torch.device("cpu"), torch.float32, fused=False)
    target = next((module for module in method.modules() if isinstance(module, Target)), None)
    if target is None:
        raise UserError(f"{folder}: method '{recipe.method.name}' has no target network; export the online one")
    try:
        method.load_state_dict(read_checkpoint(file)["method"])
    except Damaged as error:
        raise UserError(f"{file}: damaged ({error}); the online network has a file of its own") from error
    except (RuntimeError, KeyError) as error:
        raise UserError(f"{file}: does not match the run's recipe.yaml") from error
    backbone = next(part for part in target if isinstance(part, Backbone))
    weight_standardisation.bake(backbone.network)
    backbone.config = backbone.config.model_copy(update={"weight_standardisation": False})
    return backbone.to(memory_format=torch.contiguous_format).eval()
