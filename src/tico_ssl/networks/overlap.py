"""Two queues of work on one GPU, inside a recorded step.

Convolutions are limited by arithmetic and what lies between them by memory, and small operations leave most of a GPU
idle: two networks side by side take less time than one after the other. Only a recorded step does so, since its graph
knows what waits for what and Python is not there to fall behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_side: torch.cuda.Stream | None = None
_busy = False  # whether work aside has not been waited for


@contextmanager
def overlapping(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within, `aside` has a second queue."""
    global _side
    _side = stream
    try:
        yield
    finally:
        join()
        _side = None


@contextmanager
def aside() -> Iterator[None]:
    """Work that nothing waits for until `join`; in its turn where there is no second queue.

    It begins after all that is queued so far. What it reads must stay alive until `join`, or its memory would be given
    to the next who asks.
    """
    global _busy
    if _side is None:
        yield
        return
    _side.wait_stream(torch.cuda.current_stream())
    _busy = True
    with torch.cuda.stream(_side):
        yield


def join() -> None:
    """From here on, what was done aside is there."""
    global _busy
    if _side is not None and _busy:
        torch.cuda.current_stream().wait_stream(_side)
    _busy = False
