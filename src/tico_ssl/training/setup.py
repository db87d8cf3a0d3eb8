"""What a recipe trains, ready for the first step: images, views, network, optimiser, schedule."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import Optimizer

from tico_ssl.config.few_images import adapted
from tico_ssl.config.recipe import Recipe
from tico_ssl.config.sections import Execution, limits_of
from tico_ssl.config.views import shorter_side
from tico_ssl.data.bad_files import BadFiles, survey
from tico_ssl.data.fingerprint import require_same_everywhere
from tico_ssl.data.measuring import settled
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.data.stored import store_for
from tico_ssl.methods._base import Method
from tico_ssl.methods._base import build_method as method_of
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.fused import fuse
from tico_ssl.networks.recomputing import recompute_blocks
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.pipeline.gpu_decoding import gpu_decoder
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.workers import chosen_workers
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.device import resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.initial import Start
from tico_ssl.training.plan import Plan
from tico_ssl.training.sharding import check_sharded, is_divided
from tico_ssl.training.step import Step, resolve_execution
from tico_ssl.views.executor import Views, by_kernels


@dataclass(frozen=True)
class Learner:
    """What a recipe trains, on a device, before the first step: all but the images."""

    recipe: Recipe
    device: torch.device
    precision: torch.dtype
    views: Views
    plan: Plan
    method: Method
    optimizer: Optimizer


@dataclass(frozen=True)
class Setup(Learner):
    """Everything that a recipe defines, on a device, before the first step."""

    source: Source
    loader: Loader


def prepare(recipe: Recipe, device: torch.device, source: Source | None = None, start: Start | None = None) -> Setup:
    """Open the images, unless they are, and build the network and its optimiser."""
    settings, data = recipe.training, recipe.data
    if settings.parts > 1 and distributed.active():
        raise UserError("training.parts needs a single process: several processes split the batch already")
    bad, workers = BadFiles(), chosen_workers(settings.workers, "training.workers")
    channels, shorter, given = recipe.backbone.channels, shorter_side(recipe.views, data.image_size), source
    source = open_training(data, channels, shorter, tell=_later) if given is None else given
    require_same_everywhere([source])
    data = settled(data, source, channels)
    recipe = adapted(recipe.model_copy(update={"data": data}), len(source), distributed.world_size())
    settings = recipe.training
    note = partial(fallbacks.note, "store")
    decoder = gpu_decoder(source, data, channels, shorter, device, workers, bad) if data.decoder == "gpu" else None
    alone = not distributed.active()
    store = store_for(source, data, channels, shorter, alone=alone, note=note) if decoder is None else None
    source = source if store is None else store.stored()
    if given is None:
        survey(source, data.most_bad, bad, workers)
    views = build_views(recipe, device)
    loader = Loader(
        source, views, settings.batch_size, settings.seed, device, workers, bad, data.on_gpu, store, decoder
    )
    learner = build_learner(recipe, device, views, loader.steps_per_epoch, start)
    together = settings.batch_size // (distributed.world_size() * settings.parts)
    if together < 2:
        raise UserError(
            f"training.batch_size {settings.batch_size} leaves 1 image per process, BatchNorm needs 2: at least "
            f"{2 * distributed.world_size()}"
        )
    recipe.method.check_batch(settings.batch_size, together)
    learner.method.check_data(len(source), source.labels)
    if settings.sharded:
        check_sharded(recipe, learner.method)
    return Setup(**vars(learner), source=source, loader=loader)


def _later(line: str) -> None:
    """What is found in the images is told with the other settings of the run."""


def build_views(recipe: Recipe, device: torch.device) -> Views:
    """The views of a recipe."""
    data, precision = recipe.data, resolve_precision(recipe.training.precision, device)
    return Views(recipe.views, data.image_size, data.mean, data.std, precision)


def build_learner(
    recipe: Recipe, device: torch.device, views: Views, steps_per_epoch: int, start: Start | None = None
) -> Learner:
    """The network of a recipe with initial weights, its optimiser and its schedule."""
    precision = resolve_precision(recipe.training.precision, device)
    method, plan = build_method(recipe, device, precision, start=start), Plan.of(recipe, steps_per_epoch)
    optimizer = build_optimizer(method, plan.optimizer, plan.peak_lr, method.fixed_rate())
    return Learner(recipe, device, precision, views, plan, method, optimizer)


def build_step(learner: Learner) -> Step:
    """The training step of a recipe."""
    settings = learner.recipe.training
    distributed.spread(learner.method)
    return Step(
        learner.method,
        learner.optimizer,
        learner.views,
        learner.precision,
        learner.device,
        settings.clip_gradient,
        execution_of(learner.recipe),
        settings.parts,
    )


def execution_of(recipe: Recipe) -> Execution:
    """The execution that a recipe asks for: the steps of a divided network are eager."""
    return "eager" if is_divided(recipe) else recipe.training.execution


def build_method(
    recipe: Recipe, device: torch.device, precision: torch.dtype, fused: bool = True, start: Start | None = None
) -> Method:
    """The method of a recipe with initial weights, on its device, in training mode. By default BatchNorm is fused where
    steps are captured."""
    torch.manual_seed(derived_seed(recipe.training.seed, "weights"))
    data = recipe.data
    limits = limits_of(data.range)
    backbone = build_backbone(recipe.backbone, data.image_size, data.mean, data.std, limits)
    if start is not None:
        start.load(backbone)
    method = method_of(recipe.method, backbone)
    method = method.to(device, torch.float64 if precision == torch.float64 else torch.float32)
    if fused and resolve_execution(execution_of(recipe), device) == "captured" and by_kernels(device):
        fuse(method)
    if recipe.training.recompute:
        recompute_blocks(method.backbone)
    return share_statistics(method.to(memory_format=torch.channels_last)).train()
