"""The largest batch of which a training step fits on the GPU."""

import gc
import math
from collections.abc import Callable
from contextlib import closing

import torch

from tico_ssl.config.recipe import Recipe
from tico_ssl.config.views import shorter_side
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.errors import MEMORY_WORDS, UserError, shortage
from tico_ssl.runtime.progress import say
from tico_ssl.training.plan import Plan
from tico_ssl.training.pretrain import build_step, prepare
from tico_ssl.training.step import WARM_UP

SHARE = 0.95  # of the GPU's memory, so that a run has some to spare
FIRST = 64  # batch that is tried first
COARSE, FINE, LARGE = 64, 8, 512  # batches are multiples of 8, from 512 on of 64
LR = 1e-4  # does not change the memory of a step; a small learning rate keeps values finite


def largest_batch(recipe: Recipe, device: torch.device) -> list[str]:
    """The batch, its memory, and what to pass to use it, in words."""
    if device.type != "cuda":
        return ["--find-batch: there is no GPU here, so there is nothing to find; keep the batch of the recipe"]
    source = open_training(recipe.data, recipe.backbone.channels, shorter_side(recipe.views, recipe.data.image_size))
    torch.cuda.set_per_process_memory_fraction(SHARE, device)
    try:
        size, peak = search(lambda size: _tried(recipe, size, source, device), len(source), recipe.training.parts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    total = torch.cuda.get_device_properties(device).total_memory
    return _words(recipe, size, len(source), f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB")


def search(peak_of: Callable[[int], int | None], most: int, parts: int = 1) -> tuple[int, int]:
    """The largest batch of at most `most` images that fits, and its peak memory. `peak_of` is None for one that does
    not fit. First by doubling, then by bisection between the last that fits and the first that does not."""
    fine, coarse = math.lcm(FINE, parts), math.lcm(COARSE, parts)
    most = most // parts * parts
    fits, peak, too_large = 0, 0, most + 1
    size = min(math.lcm(FIRST, parts), most)
    while fits < size < too_large:
        found = peak_of(size)
        if found is None:
            too_large = size
        else:
            fits, peak = size, found
        unit = coarse if fits >= LARGE else fine
        doubled = min(2 * fits, most) if too_large > most else 0
        size = doubled or (fits + too_large) // 2 // unit * unit
    if not fits:
        raise UserError(
            f"not even a batch of {too_large} images fits on the GPU: set training.recompute=true, "
            "or choose a smaller data.image_size, backbone.name or method"
        )
    return fits, peak


def _tried(recipe: Recipe, size: int, source: Source, device: torch.device) -> int | None:
    """The peak memory of steps with a batch of this size in bytes; None if it does not suffice."""
    torch.cuda.reset_peak_memory_stats(device)
    fallbacks.drain()
    try:
        _make_steps(_with_batch(recipe, size), source, device)
        short = any(
            MEMORY_WORDS.search(reason) for reason in fallbacks.drain().values()
        )  # a step that was not captured
    except RuntimeError as error:
        if shortage(error) is None:
            raise
        short = True
    peak = torch.cuda.max_memory_allocated(device)
    gc.collect()  # a captured step is a reference cycle
    torch.cuda.empty_cache()
    say(f"batch {size}: " + ("does not fit" if short else f"{peak / 2**30:.1f} GiB"))
    return None if short else peak


def _make_steps(recipe: Recipe, source: Source, device: torch.device) -> None:
    """As many steps as it takes until one is captured and replayed."""
    setup = prepare(recipe, device, source)
    step, batches = build_step(setup), setup.loader.iterate(0, WARM_UP + 2)
    with closing(batches):
        for raw in batches:
            step(raw, LR, 0.0)
    torch.cuda.synchronize(device)


def _with_batch(recipe: Recipe, size: int) -> Recipe:
    training = recipe.training.model_copy(update={"batch_size": size})
    return recipe.model_copy(update={"training": training})


def _words(recipe: Recipe, size: int, images: int, memory: str) -> list[str]:
    """What was found, and what it means for the learning rate."""
    now, then = (Plan.of(changed, 1).peak_lr for changed in (recipe, _with_batch(recipe, size)))
    rule = "scaled with the batch, as optimizer.scale_lr says" if recipe.optimizer.scale_lr else "not scaled"
    limit = f", which is all {images:,} images" if size + recipe.training.parts > images else ""
    return [
        f"the largest batch that fits has {size} images{limit}: {memory}",
        f"to use it     training.batch_size={size} (this recipe: {recipe.training.batch_size})",
        f"learning rate {then:g} (this recipe: {now:g}), {rule}; results with another batch are other results",
    ]
