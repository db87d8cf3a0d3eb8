"""The loop that every training goes through: pretraining, classifiers, detectors.

Batches from the step where a checkpoint left off; the network's random numbers a function of seed and step; a request
to stop, on which all processes agree, answered with a checkpoint. So what is interrupted goes on as if it never was.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.checkpoint import Interrupted, StopRequest
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.step import Outcome

B = TypeVar("B")


@dataclass(frozen=True)
class Course:
    """Steps from one to another, and the seed of what a network draws in them. If it is interrupted, `name` says what
    was, and `go_on` how it goes on."""

    start: int
    steps: int
    seed: int
    name: str = ""
    go_on: str = ""


def _nothing(done: int) -> None:
    """Nothing happens between steps."""


def _finite(outcome: Outcome) -> bool:
    return bool(outcome.output.loss.isfinite())


def _say(done: int, reasons: dict[str, str]) -> None:
    for what, reason in reasons.items():
        say(f"warning: {fallbacks.sentence(what, reason)}")


@dataclass(frozen=True)
class Hooks(Generic[B]):
    """What a training does, and at which moments. Steps that are done are counted from 1."""

    make_step: Callable[[int, B], Outcome]
    """One step, the rate of which depends on its number, from 0."""
    log_due: Callable[[int], bool]
    log: Callable[[int, Outcome], None]
    """Look at a step: the one moment that waits for the device, and at which several processes agree to stop."""
    save_due: Callable[[int], bool]
    save: Callable[[int], None]
    """Write a checkpoint; called in the main process alone."""
    between: Callable[[int], None] = _nothing
    """What is no training: kNN, scores. Its time, and that of checkpoints, is left out of the throughput."""
    sound: Callable[[Outcome], bool] = _finite
    """Whether the state after a step is worth a checkpoint."""
    tell: Callable[[int, dict[str, str]], None] = _say
    """What is not carried out as it was meant to be, with the reasons; once each."""


def train(course: Course, batches: Generator[B], hooks: Hooks[B], clock: Clock, display: Display) -> None:
    """Make every step of a course, one for each batch."""
    told: set[str] = set()
    with closing(batches), display, StopRequest() as stop:
        for step, batch in enumerate(batches, course.start):
            torch.manual_seed(derived_seed(course.seed, "network", step, distributed.rank()))
            outcome = hooks.make_step(step, batch)
            done = step + 1
            display.advance(done)
            if new := {what: why for what, why in fallbacks.drain().items() if what not in told}:
                told.update(new)
                hooks.tell(done, new)
            at_log_step = hooks.log_due(done)
            if at_log_step:
                hooks.log(done, outcome)
            with clock.pause():
                hooks.between(done)
                stopping = stop.agreed(at_log_step) and done < course.steps
                if hooks.save_due(done) or stopping:  # last, so that a checkpoint never runs ahead of the metrics
                    if distributed.is_main() and hooks.sound(outcome):
                        hooks.save(done)
                    distributed.barrier()
                    clock.saved()
            if stopping:
                who = f"{course.name}: " if course.name else ""
                raise Interrupted(f"{who}stopped after step {done} of {course.steps}{course.go_on}")


def parallel(module: nn.Module) -> nn.Module:
    """A module whose gradients are means over processes, if there are several."""
    return DistributedDataParallel(module, broadcast_buffers=False) if distributed.active() else module
