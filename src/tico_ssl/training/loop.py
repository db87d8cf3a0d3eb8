"""The training loop, shared by pretraining, classifiers and detectors.

Batches start at the step of the checkpoint; random numbers of the network are a function of seed and step; a request
to stop, agreed on by all processes, ends with a checkpoint. So a resumed training is identical to an uninterrupted one.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.errors import Interrupted, UserError, refusal
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.checkpoint import StopRequest
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.forecast import Forecast
from tico_ssl.training.journal import check_finite
from tico_ssl.training.step import Outcome

B = TypeVar("B")


@dataclass(frozen=True)
class Course:
    """Steps from `start` to `steps`, and the seed of the network's random numbers. When interrupted, the message has
    `name` and `go_on`, which says how to continue."""

    start: int
    steps: int
    seed: int
    name: str = ""
    go_on: str = ""
    timed: Sequence[int] = ()
    """Numbers of completed steps from which on a few are timed for a forecast."""


def _nothing(done: int) -> None:
    """The default hook."""


def _unsaid(done: int, seconds: float) -> None:
    """The default forecast."""


def _finite_loss(done: int, batch: object, outcome: Outcome) -> None:
    check_finite(float(outcome.output.loss), done, "lower the learning rate")


def _say(done: int, reasons: dict[str, str]) -> None:
    for what, reason in reasons.items():
        say(f"warning: {fallbacks.sentence(what, reason)}")


@dataclass(frozen=True)
class Hooks(Generic[B]):
    """Callbacks of a training. Completed steps are counted from 1."""

    make_step: Callable[[int, B], Outcome]
    """One training step; its number counts from 0."""
    log_due: Callable[[int], bool]
    log: Callable[[int, Outcome], None]
    """Log a step: the only moment that synchronises with the device, besides several processes' questions whether to
    stop."""
    save_due: Callable[[int], bool]
    save: Callable[[int], None]
    """Write a checkpoint; called in the main process only."""
    before_save: Callable[[int], None] = _nothing
    """What every process contributes to a checkpoint."""
    between: Callable[[int], None] = _nothing
    """Work other than training: kNN, evaluation. Its time, and that of checkpoints, is excluded from the throughput."""
    check: Callable[[int, B, Outcome], None] = _finite_loss
    """Raise an error if a step has left what must be neither logged nor saved; in every process."""
    tell: Callable[[int, dict[str, str]], None] = _say
    """Report what fell back to a slower path, with reasons; once each."""
    foretell: Callable[[int, float], None] = _unsaid
    """Say how many seconds the rest will take, roughly."""


def train(course: Course, batches: Generator[B], hooks: Hooks[B], clock: Clock, display: Display) -> None:
    """Carry out all steps, one per batch."""
    told, forecast = set[str](), Forecast(course.steps, course.timed)
    with closing(batches), display, StopRequest() as stop:
        for step, batch in enumerate(batches, course.start):
            seed_network(course.seed, step)
            outcome = hooks.make_step(step, batch)
            done = step + 1
            display.advance(done)
            if new := {what: why for what, why in fallbacks.drain().items() if what not in told}:
                told.update(new)
                hooks.tell(done, new)
            if (seconds := forecast.left(done)) is not None:
                hooks.foretell(done, seconds)
            at_log_step = hooks.log_due(done)
            if at_log_step:
                hooks.check(done, batch, outcome)
                hooks.log(done, outcome)
            with clock.pause():
                hooks.between(done)
                stopping = stop.agreed(done - course.start) and done < course.steps
                if hooks.save_due(done) or stopping:  # last, so that a checkpoint is never ahead of the metrics
                    if not at_log_step:
                        hooks.check(done, batch, outcome)
                    refused = _refused(hooks, done)
                    if refused is None:
                        clock.saved()
                    elif stopping or done == course.steps:
                        where = f"{course.name}: step {done} of {course.steps}".removeprefix(": ")
                        raise UserError(
                            f"{where} could not be saved: {refused}; what was saved before is kept{course.go_on}"
                        )
                    else:
                        say(f"warning: no checkpoint after step {done}: {refused}; it is tried again when one is due")
            if stopping:
                who = f"{course.name}: " if course.name else ""
                raise Interrupted(f"{who}stopped after step {done} of {course.steps}{course.go_on}", stop.number)


def _refused(hooks: Hooks[B], done: int) -> str | None:
    """Write a checkpoint. Returns why it cannot be written, if so, in every process: a full disk may have room again
    when the next one is due, and what was saved before is still there."""
    reason = None
    hooks.before_save(done)
    if distributed.is_main():
        try:
            hooks.save(done)
        except Exception as error:
            if (reason := refusal(error)) is None:
                raise
    main: str | None = distributed.everyone(reason)[0]
    return main


def seed_network(seed: int, step: int) -> None:
    """Make the random numbers that a network draws in a step a function of seed and step."""
    torch.manual_seed(derived_seed(seed, "network", step, distributed.rank()))
