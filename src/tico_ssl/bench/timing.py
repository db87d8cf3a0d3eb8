"""Timing: work repeated for some seconds, timed by the clock of its device."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

Mark = float | torch.cuda.Event  # a time in seconds, or an event in a CUDA stream

AHEAD = 4  # rounds that the CPU may be ahead of the GPU, so that no minutes of work pile up in its stream
WARM_UP = {"cuda": 6}  # rounds in which libraries choose algorithms, and a step is captured (after three)


def time_in_turn(
    works: Mapping[str, Callable[[], object]],
    seconds: float,
    device: torch.device,
    warm_up: int = 0,
    at_least: int = 3,
) -> dict[str, list[float]]:
    """Seconds of every call, for several pieces of work that alternate round by round."""
    for _ in range(max(warm_up, WARM_UP.get(device.type, 2))):
        for work in works.values():
            work()
    _wait_for(device)
    begin = time.perf_counter()
    rounds: list[list[Mark]] = []
    while len(rounds) < at_least or time.perf_counter() - begin < seconds:
        marks = [_mark(device)]
        for work in works.values():
            work()
            marks.append(_mark(device))
        rounds.append(marks)
        if len(rounds) > AHEAD and isinstance(late := rounds[-AHEAD][-1], torch.cuda.Event):
            late.synchronize()
    _wait_for(device)
    laps = [[_between(a, b) for a, b in pairwise(marks)] for marks in rounds]
    return dict(zip(works, map(list, zip(*laps)), strict=True))


def time_calls(
    work: Callable[[], object], seconds: float, device: torch.device, warm_up: int = 0, at_least: int = 3
) -> list[float]:
    """Seconds of every call of one piece of work."""
    return time_in_turn({"": work}, seconds, device, warm_up, at_least)[""]


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
