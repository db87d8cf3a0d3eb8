"""How long a training will take, from its first steps."""

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

TIMED = 3.0  # seconds of steps, at least; a training that is over before needs no forecast
GPU_WARM_UP, CPU_WARM_UP = 4, 1  # steps that do not count: algorithms are chosen, and a step is captured after three
WORTH_SAYING = 1.5  # factor between two forecasts


class Forecast:
    """Steps are timed from each of the `moments` on, numbers of completed steps, and after the last whenever twice as
    many are done: the first seconds of a training may be slow for many reasons."""

    def __init__(self, steps: int, moments: Sequence[int], clock: Callable[[], float] = perf_counter) -> None:
        self.steps, self._moments, self._clock = steps, list(moments), clock
        self._begun: tuple[int, float] | None = None
        self._said = math.inf
        """Seconds per step, as forecast last."""

    def left(self, done: int) -> float | None:
        """After every step: seconds for the rest, when there is something new to say."""
        if self._begun is None:
            if self._moments and done >= self._moments[0] + (GPU_WARM_UP if _on_gpu() else CPU_WARM_UP):
                self._begun = done, self._now()
            return None
        first, then = self._begun
        if self._clock() - then < TIMED or done == self.steps:
            return None
        pace = (self._now() - then) / (done - first)
        self._begun = None
        del self._moments[0]
        if not self._moments and 2 * done < self.steps:
            self._moments = [2 * done]
        if max(pace / self._said, self._said / pace) < WORTH_SAYING:
            return None
        self._said = pace
        return pace * (self.steps - done)

    def _now(self) -> float:
        if _on_gpu():
            torch.cuda.synchronize()  # a few times in a training
        return self._clock()


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
