"""Features of two networks over photos, against a bare loop that decodes, preprocesses and computes on all cores.

    python benchmarks/feature_extraction.py FOLDER [--images 600] [--size 112] [--model torchvision/resnet18]

The bare loop is what the work costs at least on a CPU: as many processes as there are cores decode and preprocess
equal shares of the files and drop the results, and then both networks take batches that are already there, with a
thread per core. Nothing is handed over, and no two kinds of work compete. All ways alternate, and the best of several
rounds counts, by the clock and in seconds of all processors. Where other programs run, the latter say more, with
OMP_WAIT_POLICY=passive: else threads that wait for each other count as busy.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.features.batches import BATCH
from tico_ssl.features.extraction import extract, extract_all, needed_side
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.pipeline.workers import chosen_workers
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device, tune_process


class Spent(NamedTuple):
    """Seconds by the clock, and of all processors together, child processes included."""

    wall: float
    cpu: float

    @classmethod
    def on(cls, work: Callable[[], Any]) -> "Spent":
        """What some work takes."""
        begun, before = time.perf_counter(), sum(os.times()[:4])
        work()
        return cls(time.perf_counter() - begun, sum(os.times()[:4]) - before)


def decode(source: Source, backbone: Backbone) -> None:
    """Decode and preprocess in as many processes as there are cores, and drop the results."""
    workers = chosen_workers(None)

    def loop(places: range) -> None:
        torch.set_num_threads(1)
        for place in places:
            backbone.preprocess([source.fetch(place)])

    context = multiprocessing.get_context("fork")
    team = [context.Process(target=loop, args=(range(w, len(source), workers),)) for w in range(workers)]
    for process in team:
        process.start()
    for process in team:
        process.join()


@torch.no_grad()
def compute(count: int, backbones: list[Backbone], device: torch.device) -> None:
    """The networks alone, on batches that are there."""
    size, channels = backbones[0].image_size, backbones[0].config.channels
    images = torch.rand(min(BATCH, count), channels, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    for begin in range(0, count, BATCH):
        for backbone in backbones:
            backbone(images[: count - begin]).cpu()


def measure(source: Source, backbones: list[Backbone], rounds: int) -> dict[str, Any]:
    """The best of each way, and the extraction in units of the bare loop."""
    device = choose_device()
    for backbone in backbones:
        backbone.eval().to(device)
    ways: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode(source, backbones[0]),
        "networks": lambda: compute(len(source), backbones, device),
        "extract_both": lambda: extract_all(backbones, source, device),
        "extract_one_after_the_other": lambda: [extract(one, source, device) for one in backbones],
    }
    rounds_of: dict[str, list[Spent]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rounds_of[name].append(Spent.on(way))
    line: dict[str, Any] = {}
    for kind in Spent._fields:
        best = {name: min(getattr(spent, kind) for spent in found) for name, found in rounds_of.items()}
        ratio = best["extract_both"] / (best["decode"] + best["networks"])
        line[kind] = {name: round(value, 2) for name, value in best.items()} | {"ratio": round(ratio, 3)}
    return line


def main() -> None:
    """Print the machine and the measurement as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--model", default="torchvision/resnet18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    tune_process(choose_device())
    config = BackboneConfig.model_validate({"name": asked.model})
    backbones = [build_backbone(config, asked.size) for _ in range(2)]
    data = DataConfig(source=str(asked.folder), image_size=asked.size)
    source = open_training(data, shorter=needed_side(backbones[0])).limited(asked.images)
    described = {"model": asked.model, "size": asked.size, "images": len(source), "workers": chosen_workers(None)}
    machine = {"machine": environment(), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY")}
    lines = [machine, described | measure(source, backbones, asked.rounds)]
    for line in lines:
        print(json.dumps(line), flush=True)
    if asked.out:
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
