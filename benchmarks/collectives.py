"""What recorded collective operations cost on one GPU: a step as it is, with NCCL in the captured graph, and eager.

    python benchmarks/collectives.py [--seconds 3] [--out collectives-h200.jsonl] [--check]

Prints JSON lines: the machine, then for ResNet-18 on 32 px (batch 512) and ResNet-50 on 224 px (batch 256) images per
second of

    plain      captured, one process: no collective operation; with target and online network one after the other
    beside     the same with the two networks side by side, as one process trains
    recorded   captured, in a process group of one process, with every collective operation of several processes
    eager      operation by operation, in the same process group

One process makes every operation and sends nothing to others: what differs is launches, copies into buckets and lost
fusion, not the wires. `--check` compares losses and weights of 20 plain and 20 recorded steps to the bit instead.
"""

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tico_ssl.bench import random_images
from tico_ssl.bench.stages import LR, PROGRESS, Subject
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.device import tune_process
from tico_ssl.training.setup import build_method
from tico_ssl.training.step import Step

RECIPES = {"cifar10/tico": 512, "imagenet/tico": 256}
FORMS = {  # process group, execution, overlap
    "plain": (False, "captured", False),
    "beside": (False, "captured", True),
    "recorded": (True, "captured", False),
    "eager": (True, "eager", False),
}
STEPS = 20


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """A process group that this package takes for one of several processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    alone, distributed.active = distributed.active, dist.is_initialized
    try:
        yield
    finally:
        distributed.active = alone
        dist.destroy_process_group()


def subject_of(name: str, batch: int, device: torch.device) -> Subject:
    """A recipe on random images."""
    recipe = load_recipe(name, {"training.batch_size": batch, "training.precision": "bf16"})
    return Subject.of(recipe, device, torch.bfloat16, random_images(recipe))


def step_of(subject: Subject, execution: str, overlap: bool) -> Step:
    """The step of a form, with new weights."""
    recipe: Recipe = subject.by(execution)  # type: ignore[arg-type]
    method = build_method(recipe, subject.device, subject.precision)
    optimizer = build_optimizer(method, recipe.optimizer)
    clip = recipe.training.clip_gradient
    return Step(
        method,
        optimizer,
        subject.views,
        subject.precision,
        subject.device,
        clip,
        execution,  # type: ignore[arg-type]
        overlap=overlap,
    )


def timed(subject: Subject, execution: str, overlap: bool, seconds: float) -> dict[str, object]:
    """Milliseconds and images per second of a form, and what was really carried out."""
    fallbacks.drain()
    torch.cuda.reset_peak_memory_stats()
    step = step_of(subject, execution, overlap)
    times = time_calls(lambda: step(subject.raw, LR, PROGRESS), seconds, subject.device)
    middle = statistics.median(times)
    made = {"execution": step.execution, "fallbacks": fallbacks.drain()}
    step.close()
    return made | {
        "steps": len(times),
        "milliseconds": round(1000 * middle, 3),
        "images_per_second": round(subject.batch / middle),
        "gibibytes": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def trained(subject: Subject) -> list[torch.Tensor]:
    """The losses of some steps, and the state that they end in."""
    step = step_of(subject, "captured", False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True  # the same algorithms every time
    losses = [step(subject.raw, LR, PROGRESS).output.loss.detach().clone() for _ in range(STEPS)]
    assert step.execution == "captured", fallbacks.drain()
    state = [value.clone() for value in step.method.state_dict().values()]
    step.close()
    return [*losses, *state]


def compared(subject: Subject) -> dict[str, object]:
    """Whether plain and recorded steps agree to the bit."""
    plain, again = trained(subject), trained(subject)
    with group_of_one(subject.device):
        recorded = trained(subject)
    equal = [sum(torch.equal(a, b) for a, b in zip(plain, other, strict=True)) for other in (again, recorded)]
    return {"tensors": len(plain), "equal_when_repeated": equal[0], "equal_when_recorded": equal[1]}


def main() -> None:
    """Measure all forms of all recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    tune_process(device)
    machine = environment()
    machine.pop("command")
    lines: list[dict[str, object]] = [{"machine": machine, "command": " ".join(sys.argv)}]
    print(json.dumps(lines[0]), flush=True)
    for name, batch in RECIPES.items():
        subject = subject_of(name, batch, device)
        for form, (grouped, execution, overlap) in FORMS.items():
            about: dict[str, object] = {"recipe": name, "batch": batch}
            if given.check:
                lines.append(about | compared(subject))
                print(json.dumps(lines[-1]), flush=True)
                break
            if grouped:
                with group_of_one(device):
                    found = timed(subject, execution, overlap, given.seconds)
            else:
                found = timed(subject, execution, overlap, given.seconds)
            lines.append(about | {"form": form} | found)
            print(json.dumps(lines[-1]), flush=True)
            torch.cuda.empty_cache()
    if given.out is not None:
        given.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
