"""A run that is killed, at any moment and inside any write, and continued: `python kills.py FOLDER POINTS MOMENTS`.

Every change that a run makes to its files is a point: a write, half of which is then made, a sync, a rename, a removal,
a new folder. First an uninterrupted run lists them. Then, at as many points as asked for, a new run is ended by SIGKILL
and continued; and as many runs as asked for are killed at random moments, most of them several times, and continued.
What is left must be that of the uninterrupted run to the bit: training state, metrics, backbone, and the results of an
evaluation. Prints one line of JSON.
"""

import builtins
import importlib
import io
import json
import os
import random
import signal
import sys
import time
from itertools import groupby
from pathlib import Path

import torch

from tico_ssl import evaluate, pretrain
from tico_ssl.results.run_folder import Run
from tico_ssl.training.checkpoint import read_checkpoint
from tiny import TINY

ON_THE_WAY = ("torch.utils.tensorboard", "tico_ssl.training.pretrain", "tico_ssl.evaluations.rankme")
for name in ON_THE_WAY:  # imported once, before processes are forked
    importlib.import_module(name)

SETTINGS = TINY | {"training.log_every_steps": 2, "training.checkpoint_seconds": 0.0}  # a checkpoint per epoch
CLOCK = ("seconds", "images_per_second", "data_wait")


class Points:
    """Counts the changes of files in a folder, by name, and ends the process at the one of a number."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.passed = str(folder), fatal, list[str]()
        for name in ("fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, self.watched(name, getattr(os, name)))
        self.open = io.open
        builtins.open = io.open = self.opened

    def reach(self, what: str) -> bool:
        self.passed.append(what)
        return len(self.passed) - 1 == self.fatal

    def watched(self, name, change):
        def watching(path, *others, **options):
            inside = name == "fsync" or (str(path).startswith(self.folder) and not Path(path).is_dir())
            if inside and self.reach(name if name == "fsync" else f"{name} {Path(path).name}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return change(path, *others, **options)

        return watching

    def opened(self, path, mode="r", *others, **options):
        file = self.open(path, mode, *others, **options)
        # TensorBoard writes in a thread of its own, at no certain moment.
        watched = set(mode) & set("wax+") and str(path).startswith(self.folder) and "tfevents" not in str(path)
        return Watched(file, Path(path).name, self) if watched else file


class Watched:
    """A file whose writes are counted."""

    def __init__(self, file, name: str, points: Points) -> None:
        self._file, self._name, self._points = file, name, points

    def write(self, content):
        if self._points.reach(f"write {self._name}"):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._file.write(content)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)


def start(folder: Path, fatal: int | None = None, watch: bool = False) -> int:
    """A process that makes the run, or goes on with it, and evaluates it."""
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(folder.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        points = Points(folder, fatal) if watch else None
        run = pretrain("demo", out=folder, overrides=SETTINGS, resume=True)
        if points is not None:
            (folder.parent / "points.json").write_text(json.dumps(points.passed))
        if not run.results():
            evaluate(folder, "rankme", cache=False)
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)


def ended(pid: int) -> int:
    """The exit code of a process, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left(folder: Path) -> dict:
    """All that must be the same."""
    run = Run(folder)
    state = read_checkpoint(run.checkpoint_file)
    del state["seconds"]
    lines = [*run.metrics(), *(json.loads(line) for line in run.spectrum_file.read_text().splitlines())]
    return {
        "state": state,
        "metrics": [{key: value for key, value in line.items() if key not in CLOCK} for line in lines],
        "backbone": run.backbone_file.read_bytes(),
        "results": [{key: value for key, value in line.items() if key != "seconds"} for line in run.results()],
        "temporary files": sorted(path.name for path in folder.rglob("*.tmp")),
    }


def differing(one, other, where: str = "") -> str | None:
    """The first difference of two nested values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (differing(one[key], other[key], f"{where}.{key}") for key in one)
        return next(filter(None, found), None)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return None if torch.equal(one, other) else where
    return None if one == other else where


def judge(folder: Path, whole: dict, name: str) -> list[str]:
    """Go on with what is left of a run until it ends, and compare it."""
    if code := ended(start(folder)):
        return [f"{name}: exit code {code} of the command that continues"]
    where = differing(left(folder), whole)
    return [f"{name}: {where} differs"] if where else []


def spread(every: list[str], count: int) -> list[int]:
    """So many points. Of writes of one file in a row, which are many, one is taken before others are."""
    groups = [[number for number, _ in group] for _, group in groupby(enumerate(every), lambda pair: pair[1])]
    first = [random.choice(group) for group in groups]
    rest = sorted(set(range(len(every))) - set(first))
    chosen = random.sample(first, min(count, len(first)))
    return sorted(chosen + random.sample(rest, min(count - len(chosen), len(rest))))


def main() -> None:
    home, points, moments = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    begun = time.perf_counter()
    assert ended(start(home / "whole", watch=True)) == 0
    seconds = time.perf_counter() - begun
    whole, every = left(home / "whole"), json.loads((home / "points.json").read_text())
    random.seed(points + moments)
    chosen = spread(every, points)
    kills, failures = 0, list[str]()
    for number in chosen:
        folder = home / f"point-{number}"
        code = ended(start(folder, number, watch=True))
        kills += code == -signal.SIGKILL
        if code != -signal.SIGKILL:
            failures.append(f"{number}, {every[number]}: not reached, exit code {code}")
        failures += judge(folder, whole, f"{number}, {every[number]}")
    for number in range(moments):
        folder = home / f"moment-{number}"
        while (pid := start(folder)) and random.random() < 0.8:
            time.sleep(random.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            kills += ended(pid) == -signal.SIGKILL
        ended(pid)
        failures += judge(folder, whole, f"moment {number}")
    print(json.dumps({"points": len(every), "tried": len(chosen), "kills": kills, "failures": failures}))


if __name__ == "__main__":
    main()
