"""Time and memory of a training step over its batch size, views included, in each execution.

    python benchmarks/step_growth.py [RECIPE] [KEY=VALUE ...] [--batches 64 128 ...] [--out FILE] [--plots FOLDER]

Random images, stored where training would store them. A batch that does not fit in memory ends the series.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from plots import line_chart

from tico_ssl.bench import random_images
from tico_ssl.bench.stages import Subject, time_execution
from tico_ssl.config.recipe import load_recipe, parse_override
from tico_ssl.config.sections import Execution
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device, resolve_precision, tune_process
from tico_ssl.training.step import resolve_execution

BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)


def main() -> None:
    """Print one JSON line for each batch size and execution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", default=["cifar10/tico"])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--ways", nargs="+", help="executions of a step, by default all that the device has")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    name, *overrides = arguments.recipe
    changes = dict(map(parse_override, overrides))
    device = choose_device()
    tune_process(device)
    ways: list[Execution] = ["eager", "captured"] if resolve_execution("auto", device) == "captured" else ["eager"]
    ways = arguments.ways or ways
    lines: list[dict[str, Any]] = []

    def keep(line: dict[str, Any]) -> None:
        """Write at once, so that an interrupted run keeps its measurements."""
        lines.append(line)
        if arguments.out:
            arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))

    keep({"machine": environment(), "recipe": arguments.recipe})
    for batch in arguments.batches:
        recipe = load_recipe(name, changes | {"training.batch_size": batch})
        precision = resolve_precision(recipe.training.precision, device)
        try:
            subject = Subject.of(recipe, device, precision, random_images(recipe))
            speeds = [time_execution(subject, way, arguments.seconds) for way in ways]
        except torch.OutOfMemoryError:
            break
        for speed in speeds:
            line = {"execution": speed.execution, "batch": batch, "milliseconds": round(1000 * speed.step_seconds, 3)}
            line["images_per_second"] = round(batch / speed.training_seconds)
            line["gibibytes"] = None if speed.peak_bytes is None else round(speed.peak_bytes / 2**30, 2)
            keep(line)
            print(json.dumps(line), flush=True)
        if arguments.plots:
            draw(lines[1:], name, arguments.plots)


def draw(lines: list[dict[str, Any]], name: str, folder: Path) -> None:
    """Time of a step over its batch size."""
    folder.mkdir(parents=True, exist_ok=True)
    traces: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        traces.setdefault(line["execution"], []).append((line["batch"], line["milliseconds"]))
    line_chart(folder / "step-over-batch.svg", f"One step of {name}", "images in a batch", "milliseconds", traces)


if __name__ == "__main__":
    main()
