"""What kNN during training costs on a folder of photos: a measurement against an epoch of steps, on a GPU.

    python benchmarks/online_knn.py FOLDER [KEY=VALUE ...] [--rounds 5] [--out FILE]

The first measurement decodes and prepares the photos, later ones find them on the GPU. Of a later one the time is
measured, and how much of it the GPU worked (all kernels and copies by torch's profiler): the rest it stood still.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tico_ssl.bench.stages import LR, PROGRESS
from tico_ssl.config.recipe import load_recipe, parse_override
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device, tune_process
from tico_ssl.training.online_knn import OnlineKnn
from tico_ssl.training.setup import build_step, prepare


def main() -> None:
    """Print, and write, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = choose_device()
    tune_process(device)
    settings = dict(map(parse_override, given.overrides)) | {"data.source": given.folder}
    setup = prepare(load_recipe("photos", settings), device)
    step, steps = build_step(setup), setup.loader.steps_per_epoch
    batches = setup.loader.iterate(0, (given.rounds + 1) * steps)

    def epoch() -> None:
        for _ in range(steps):
            step(next(batches), LR, PROGRESS)

    measured = OnlineKnn.of(setup.recipe, setup.source, device)
    assert measured is not None, "the photos have no labels"
    backbone = setup.method.backbone

    def measure() -> None:
        measured.measure(backbone)

    lines: list[dict[str, Any]] = [{"machine": environment()}]
    first, of_epochs = seconds(epoch), [seconds(epoch) for _ in range(given.rounds)]
    line: dict[str, Any] = {"photos": [len(measured.bank), len(measured.queries)], "first_epoch": round(first, 4)}
    line |= {"epoch": round(statistics.median(of_epochs), 4), "first_measurement": round(seconds(measure), 4)}
    line |= {"measurement": round(statistics.median(seconds(measure) for _ in range(given.rounds)), 4)}
    if device.type == "cuda":
        busy = busy_seconds(measure)
        line |= {
            "gpu_busy": round(busy, 4),
            "gpu_idle_of_epoch": round((line["measurement"] - busy) / line["epoch"], 4),
        }
    every = setup.recipe.training.knn_every_epochs
    share = line["measurement"] / (every * line["epoch"] + line["measurement"])
    lines.append(line | {"every_epochs": every, "share_of_training": round(share, 4)})
    step.close()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")


def seconds(work: Callable[[], None]) -> float:
    """By the clock, until the GPU is done."""
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def busy_seconds(work: Callable[[], None]) -> float:
    """How long the GPU had work, whatever the stream."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        seconds(work)
    events = [event for event in recorded.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, until = 0.0, 0.0
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6


if __name__ == "__main__":
    main()
