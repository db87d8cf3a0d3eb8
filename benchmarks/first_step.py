"""Time to the first step: from the start of a new process until a step is done, and until it is captured.

    python benchmarks/first_step.py [RECIPE] [KEY=VALUE ...] [--out FILE]

Once with an empty cache of compiled kernels, then twice with the cache of the first process. The process imports
the package, builds networks and views, loads random images and steps; on a GPU it also chooses convolution
algorithms, and the fourth step is captured as a CUDA graph.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import json, sys, time
import torch
from tico_ssl.bench import random_images
from tico_ssl.bench.stages import LR, PROGRESS, Subject
from tico_ssl.config.recipe import load_recipe, parse_override
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.runtime.device import choose_device, resolve_precision, tune_process
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import WARM_UP, Step
marks = {"imported": time.time()}
recipe = load_recipe(sys.argv[1], dict(map(parse_override, sys.argv[2:])))
device = choose_device()
tune_process(device)
precision = resolve_precision(recipe.training.precision, device)
subject = Subject.of(recipe, device, precision, random_images(recipe))
method = build_method(recipe, device, precision)
optimizer = build_optimizer(method, recipe.optimizer)
step = Step(method, optimizer, subject.views, precision, device, recipe.training.clip_gradient, "auto")
for number in range(WARM_UP + 1):
    float(step(subject.raw, LR, PROGRESS).output.loss.detach())
    marks.setdefault("first_step", time.time())
print(json.dumps(marks | {"recorded": time.time(), "execution": step.execution}))
"""


def measured(arguments: list[str], cache: str) -> dict[str, Any]:
    """Seconds from the start of a process to each mark."""
    folders = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    begin = time.time()
    child = [sys.executable, "-c", CHILD, *arguments]
    text = subprocess.run(child, env=os.environ | folders, check=True, capture_output=True, text=True).stdout
    marks = json.loads(text.splitlines()[-1])
    execution = marks.pop("execution")
    return {"execution": execution, **{name: round(at - begin, 2) for name, at in marks.items()}}


def main() -> None:
    """Print one JSON line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", default=["demo"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from tico_ssl.results.run_folder import environment

    lines: list[dict[str, Any]] = [{"machine": environment(), "recipe": arguments.recipe}]
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm", "warm"):
            lines.append({"cache": kind, **measured(arguments.recipe, cache)})
            print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
