"""The first lines of a run: what is about to train."""

import torch

from tico_ssl.data.measuring import normalised
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.stems import coarse_stem, has_small_stem, has_stem
from tico_ssl.runtime import distributed
from tico_ssl.runtime.wording import counted
from tico_ssl.training.setup import Setup, execution_of
from tico_ssl.training.step import resolve_execution
from tico_ssl.views.table import left_out


def _stem(backbone: Backbone) -> str:
    """Which stem a ResNet has: that for small images keeps their resolution, and costs as much as images four times as
    wide and high."""
    if not has_stem(backbone.network):
        return ""
    return " with the stem for small images" if has_small_stem(backbone.network) else " with the standard stem"


def _class_count(labels: torch.Tensor) -> int:
    return int(labels.max()) + 1 if labels.ndim == 1 else labels.shape[1]


def described(setup: Setup) -> list[str]:
    """Images, network, machine and schedule."""
    recipe, settings, source, device = setup.recipe, setup.recipe.training, setup.source, setup.device
    size = sum(parameter.numel() for parameter in setup.method.backbone.parameters()) / 1e6
    threads = counted(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads}"
    labels = "no labels"
    if source.labels is not None:
        labels = counted(len(source.classes) or _class_count(source.labels), "class")
    steps, batch = counted(setup.plan.steps_per_epoch, "step"), counted(settings.batch_size, "image")
    rule = f" ({recipe.optimizer.lr:g} x {settings.batch_size}/256)" if recipe.optimizer.scale_lr else ""
    decay = setup.plan.optimizer.weight_decay
    scaled = "" if decay == recipe.optimizer.weight_decay else f", weight decay {decay:.3g} (rate x decay as for 256)"
    lines = [
        f"{recipe.method.name} on {source.name}: {counted(len(source), 'image')} ({labels}), {setup.loader.storage}",
        f"{recipe.backbone.name}{_stem(setup.method.backbone)}, {size:.2f} M parameters, {recipe.data.image_size} px; "
        f"{where}, "
        f"{str(setup.precision).removeprefix('torch.')}, {resolve_execution(execution_of(recipe), device)} steps, "
        f"{counted(distributed.world_size(), 'process')}",
        f"{counted(settings.epochs, 'epoch')} of {steps} of {batch}; "
        f"{recipe.optimizer.name}, learning rate {setup.plan.peak_lr:g}{rule}{scaled}",
        *([setup.plan.shortened] if setup.plan.shortened else []),
        *([coarse] if (coarse := coarse_stem(setup.method.backbone.network, recipe.data.image_size)) else []),
    ]
    without = sorted({name for policy in recipe.views for name in left_out(policy, recipe.backbone.channels)})
    if source.scaling is not None:
        lines.append(source.scaling.line())
    if recipe.backbone.channels != 3:
        lines.append(normalised(recipe.data))
    if without:
        lines.append(
            f"images of {recipe.backbone.channels} channels: {' and '.join(without)} are left out of the views"
        )
    return lines
