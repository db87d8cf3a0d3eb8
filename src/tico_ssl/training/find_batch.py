"""The largest batch of which a training step fits on the GPU."""

import gc
import math
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch

from tico_ssl.config.recipe import Recipe
from tico_ssl.config.views import shorter_side
from tico_ssl.data.measuring import settled
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.errors import MEMORY_WORDS, UserError, shortage
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted
from tico_ssl.training.plan import Plan
from tico_ssl.training.setup import build_step, prepare
from tico_ssl.training.step import WARM_UP

SHARE = 0.95  # of the GPU's memory, so that a run has some to spare
FIRST = 64  # batch that is tried first
COARSE, FINE, LARGE = 64, 8, 512  # batches are multiples of 8, from 512 on of 64
LR = 1e-4  # does not change the memory of a step; a small learning rate keeps values finite


def largest_batch(recipe: Recipe, device: torch.device) -> list[str]:
    """The batch, its memory, and what to pass to use it, in words."""
    if device.type != "cuda":
        return ["there is no GPU here, so there is nothing to find; keep the batch of the recipe"]
    source = open_training(recipe.data, recipe.backbone.channels, shorter_side(recipe.views, recipe.data.image_size))
    recipe = recipe.model_copy(update={"data": settled(recipe.data, source, recipe.backbone.channels)})
    torch.cuda.set_per_process_memory_fraction(SHARE, device)
    try:
        total = torch.cuda.get_device_properties(device).total_memory
        trial = partial(_tried, recipe, source, device)
        size, peak = search(trial, len(source), recipe.training.parts, SHARE * total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return _words(recipe, size, len(source), f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB")


def search(
    peak_of: Callable[[int], int | None], most: int, parts: int = 1, memory: float = math.inf
) -> tuple[int, int]:
    """The largest batch of at most `most` images that fits, and its peak memory. `peak_of` is None for one that does
    not fit. A trial takes seconds, so each is the largest that should fit into `memory` by a line through two peaks;
    bisection where that was wrong."""
    fine, coarse = math.lcm(FINE, parts), math.lcm(COARSE, parts)
    most = most // parts * parts
    peaks: dict[int, int] = {}  # of the batches that fit, in ascending order
    too_large, stride = most + 1, 1
    size = min(math.lcm(FIRST, parts), most)
    while max(peaks, default=0) < size < too_large:
        found = peak_of(size)
        if found is None:
            too_large = size
        else:
            peaks[size] = found
        fits = max(peaks, default=0)
        unit = coarse if fits >= LARGE else fine
        more = (fits // unit + 1) * unit
        size = max(more, (fits + too_large) // 2 // unit * unit)
        if found is not None:
            expected = _expected(peaks, memory) // unit * unit
            if expected < more:  # the GPU should be full, so little more can fit
                expected, stride = more + (stride - 1) * unit, 2 * stride
            size = min(expected, most) if min(expected, most) < too_large else size
    if not peaks:
        raise UserError(
            f"not even a batch of {counted(too_large, 'image')} fits on the GPU: set training.recompute=true, "
            "or choose a smaller data.image_size, backbone.name or method"
        )
    return fits, peaks[fits]


def _expected(peaks: dict[int, int], memory: float) -> int:
    """The batch that should just fit, by the last peak and that of at most half its batch; twice the last, if there is
    no other."""
    last = max(peaks)
    before = max((size for size in peaks if 2 * size <= last), default=None)
    if before is None or memory == math.inf or peaks[last] <= peaks[before]:
        return 2 * last
    return last + int((memory - peaks[last]) * (last - before) / (peaks[last] - peaks[before]))


def _tried(recipe: Recipe, source: Source, device: torch.device, size: int) -> int | None:
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
    limit = f", which is all {counted(images, 'image')}" if size + recipe.training.parts > images else ""
    return [
        f"the largest batch that fits has {counted(size, 'image')}{limit}: {memory}",
        f"to use it     training.batch_size={size} (this recipe: {recipe.training.batch_size})",
        f"learning rate {then:g} (this recipe: {now:g}), {rule}; results with another batch are other results",
    ]
