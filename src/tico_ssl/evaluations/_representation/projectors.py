"""The projector of a run, which is dropped after training: where the loss acts, and where collapse begins."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tico_ssl.evaluations._context import Context
from tico_ssl.methods._base import Method, build_method
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.results.run_folder import open_run
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed, generator
from tico_ssl.training.checkpoint import Damaged, read_checkpoint

CHUNK = 4_096
CALIBRATION = 2_560  # features to calibrate the untrained projector's BatchNorm, like its backbone's


@torch.no_grad()
def embeddings(context: Context, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Unit-length embeddings (..., dim) of features (..., width) by the trained and the untrained projector.

    Empty if there is no run, its method has no projector, or its checkpoint has been deleted.
    """
    found = {}
    for name, projector in _projectors(context).items():
        flat = features[name].flatten(0, -2)
        projected = torch.cat([projector(part.to(context.device)).cpu() for part in flat.split(CHUNK)])
        found[name] = F.normalize(projected, dim=1).unflatten(0, features[name].shape[:-1])
    return found


def _projectors(context: Context) -> dict[str, nn.Module]:
    if "projectors" not in context.kept:
        context.kept["projectors"] = _read(context)
    kept: dict[str, nn.Module] = context.kept["projectors"]
    return kept


def _read(context: Context) -> dict[str, nn.Module]:
    if context.run is None:
        return {}
    run = open_run(context.run)
    if not run.checkpoint_file.is_file():
        say(f"no metrics of the embedding: {run.checkpoint_file} does not exist")
        return {}
    method = _fresh(context)
    if method.projector is None:
        return {}
    fresh = copy.deepcopy(method.projector)
    try:
        method.load_state_dict(read_checkpoint(run.checkpoint_file)["method"])
    except (OSError, RuntimeError, KeyError, Damaged) as error:
        say(f"no metrics of the embedding: {run.checkpoint_file} cannot be read ({str(error).splitlines()[0]})")
        return {}
    features = context.features("untrained").train
    shuffled = features[torch.randperm(len(features), generator=generator(context.seed, "split", 1))[:CALIBRATION]]
    calibrate(fresh.to(context.device), shuffled.to(context.device).split(256))
    return {"trained": method.projector.to(context.device).eval(), "untrained": fresh}


def _fresh(context: Context) -> Method:
    """The method before training."""
    assert context.run is not None
    recipe = open_run(context.run).recipe()
    data = recipe.data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(recipe.training.seed, "weights"))
        backbone = build_backbone(recipe.backbone, data.image_size, data.mean, data.std)
        return build_method(recipe.method, backbone)
