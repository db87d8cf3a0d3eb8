"""The largest batch of which a training step fits on the GPU."""

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
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
        size, peak = search(trial, sizes_for(recipe, len(source)), SHARE * total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return _words(recipe, size, len(source), f"{peak / 2**30:.1f} of {total / 2**30:.1f} GiB")


def sizes_for(recipe: Recipe, most: int) -> list[int]:
    """The batches that may be tried, in ascending order: those of at most `most` images that the method can take."""
    parts = recipe.training.parts
    fine, coarse = math.lcm(FINE, parts), math.lcm(COARSE, parts)
    most = most // parts * parts
    everything = sorted({*range(fine, min(LARGE, most + 1), fine), *range(coarse, most + 1, coarse), most})
    sizes = [size for size in everything if size >= 2 * parts and _takes(recipe, size)]
    if not sizes:
        recipe.method.check_batch(most, most // parts)  # says why
        raise UserError(f"{counted(most, 'image')} are too few for a batch")
    return sizes


def _takes(recipe: Recipe, size: int) -> bool:
    try:
        recipe.method.check_batch(size, size // recipe.training.parts)
    except UserError:
        return False
    return True


def search(peak_of: Callable[[int], int | None], sizes: Sequence[int], memory: float = math.inf) -> tuple[int, int]:
    """The largest of some batches, in ascending order, that fits, and its peak memory. `peak_of` is None for one that
    does not fit. A trial takes seconds, so each is the largest that should fit into `memory` by a line through two
    peaks; bisection where that was wrong."""
    peaks: dict[int, int] = {}  # of the batches that fit, in ascending order
    fits, too_large, stride = -1, len(sizes), 1  # places in `sizes`
    at = max(0, bisect_right(sizes, FIRST) - 1)
    while fits < at < too_large:
        found = peak_of(sizes[at])
        if found is None:
            too_large = at
        else:
            fits, peaks[sizes[at]] = at, found
        at = max(fits + 1, (fits + too_large) // 2)
        if found is not None:
            expected = bisect_right(sizes, _expected(peaks, memory)) - 1
            if expected <= fits:  # the GPU should be full, so little more can fit
                expected, stride = fits + stride, 2 * stride
            expected = min(expected, len(sizes) - 1)
            at = expected if expected < too_large else at
    if not peaks:
        raise UserError(
            f"not even a batch of {counted(sizes[0], 'image')} fits on the GPU: set training.recompute=true, "
            "or choose a smaller data.image_size, backbone.name or method"
        )
    return sizes[fits], peaks[sizes[fits]]


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
    training = recipe.training.model_copy(update={"batch_size": size, "least_steps": 0})
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
