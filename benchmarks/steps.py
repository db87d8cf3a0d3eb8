"""Whole training steps of a recipe on random images, built in several forms and timed alternately, so that other load
on the machine affects all forms."""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from tico_ssl.bench import random_images
from tico_ssl.bench.stages import LR, PROGRESS, Subject
from tico_ssl.bench.timing import time_in_turn
from tico_ssl.config.recipe import Recipe, load_recipe, parse_override
from tico_ssl.networks import fused
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.device import choose_device, resolve_precision
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import WARM_UP, Step


@dataclass(frozen=True)
class Form:
    """How a step is built."""

    overlap: bool = True
    fused: bool = True
    together: bool = True
    """Several small views in one pass of the backbone."""


def main(description: str | None, recipes: Mapping[str, Mapping[str, Any]], forms: Mapping[str, Form]) -> None:
    """Print one JSON line for the machine, and one for each recipe and form."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of every recipe")
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=list(recipes))
    parser.add_argument("--seconds", type=float, default=4.0, help="for all forms of a recipe together")
    arguments = parser.parse_args()
    print(json.dumps({"machine": environment()}), flush=True)
    for name in arguments.recipes:
        recipe = load_recipe(name, dict(recipes[name]) | dict(map(parse_override, arguments.overrides)))
        for line in timed(recipe, forms, arguments.seconds):
            print(json.dumps({"recipe": name} | line), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def timed(recipe: Recipe, forms: Mapping[str, Form], seconds: float) -> Iterator[dict[str, Any]]:
    """Median and quartiles of a step in every form, and images per second; or why a form is not possible."""
    device = choose_device()
    precision = resolve_precision(recipe.training.precision, device)
    subject = Subject.of(recipe, device, precision, random_images(recipe))
    works: dict[str, Callable[[], object]] = {}
    execution = ""
    for name, form in forms.items():
        try:
            step = _warm(subject, form)
            works[name], execution = partial(step, subject.raw, LR, PROGRESS), step.execution
        except RuntimeError as error:
            yield {"form": name, "error": str(error).strip().splitlines()[0][:200]}
    for name, laps in time_in_turn(works, seconds, device).items():
        low, middle, high = (1000 * quartile for quartile in statistics.quantiles(laps, n=4))
        yield {
            "form": name,
            "network": recipe.backbone.name,
            "image_size": recipe.data.image_size,
            "batch": subject.batch,
            "execution": execution,
            "precision": str(precision).removeprefix("torch."),
            "steps": len(laps),
            "milliseconds": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "images_per_second": round(1000 * subject.batch / middle),
        }


def _warm(subject: Subject, form: Form) -> Step:
    """A step after capture, if it is to be captured; one that cannot be captured would be timed as something else."""
    recipe = subject.by("auto")
    method = build_method(recipe, subject.device, subject.precision, fused=form.fused)
    step = Step(
        method,
        build_optimizer(method, recipe.optimizer),
        subject.views,
        subject.precision,
        subject.device,
        recipe.training.clip_gradient,
        "auto",
        overlap=form.overlap,
    )
    fallbacks.drain()
    with mock.patch.object(fused, "JOINED_PIXELS", fused.JOINED_PIXELS if form.together else 0):
        for _ in range(WARM_UP + 1):  # the last one is captured, and stays as it is
            step(subject.raw, LR, PROGRESS)
    for what, reason in fallbacks.drain().items():
        raise RuntimeError(fallbacks.sentence(what, reason))
    return step
