"""Wall-clock time of a training, across interruptions, and of its steps alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Starts when it is created; `seconds` were spent before, up to step `start`."""

    def __init__(self, start: int = 0, seconds: float = 0.0) -> None:
        self._before, self._begun = seconds, time.perf_counter()
        self._lap, self._paused = (start, self._begun), 0.0
        self._saved: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent on this training, without interruptions."""
        return self._before + time.perf_counter() - self._begun

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude time that is not spent on training steps from laps."""
        before = time.perf_counter()
        yield
        self._paused += time.perf_counter() - before

    def lap(self, step: int) -> tuple[int, float]:
        """Steps since the last call, and the seconds that they took."""
        now = time.perf_counter()
        (last, then), paused = self._lap, self._paused
        self._lap, self._paused = (step, now), 0.0
        return step - last, max(1e-9, now - then - paused)

    @property
    def ever_saved(self) -> bool:
        """Whether a checkpoint was written since the clock started."""
        return self._saved is not None

    @property
    def since_saved(self) -> float:
        """Seconds since the last checkpoint, or since the clock started."""
        return time.perf_counter() - (self._begun if self._saved is None else self._saved)

    def saved(self) -> None:
        """A checkpoint was written now."""
        self._saved = time.perf_counter()
