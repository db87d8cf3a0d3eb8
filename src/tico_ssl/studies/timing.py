"""The time of a variant's steps on an idle machine."""

import statistics

import torch

from tico_ssl.bench.stages import LR, PROGRESS, Subject, in_full_flow
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.recipe import Recipe, dump_recipe
from tico_ssl.config.views import shorter_side
from tico_ssl.data.measuring import settled
from tico_ssl.data.sources import open_training
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.runtime.device import choose_device, resolve_precision, tune_process
from tico_ssl.studies.cost import Cost
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import Step

TIMED_SECONDS = 4.0
FEWEST_STEPS = 10


def measure(recipe: Recipe) -> Cost:
    """Time whole training steps of a recipe, from images to target update."""
    device = choose_device()
    tune_process(device)
    settings, precision = recipe.training, resolve_precision(recipe.training.precision, device)
    source = open_training(recipe.data, recipe.backbone.channels, shorter_side(recipe.views, recipe.data.image_size))
    planned = recipe
    recipe = recipe.model_copy(update={"data": settled(recipe.data, source, recipe.backbone.channels)})
    subject = Subject.of(recipe, device, precision, source)
    method = build_method(recipe, device, precision)
    method.check_data(len(source), source.labels)
    optimizer = build_optimizer(method, recipe.optimizer)
    step = Step(
        method,
        optimizer,
        subject.views,
        precision,
        device,
        settings.clip_gradient,
        settings.execution,
        settings.parts,
    )
    batches = subject.raw_batches()
    flow = in_full_flow(subject)
    flow["at_least"] = max(FEWEST_STEPS, flow.get("at_least", 0))
    times = time_calls(lambda: step(next(batches), LR, PROGRESS), TIMED_SECONDS, device, **flow)
    return Cost(
        statistics.fmean(times),
        subject.loader.steps_per_epoch,
        settings.batch_size,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        torch.get_num_threads(),
        dump_recipe(planned),
    )
