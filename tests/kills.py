"""A run that is killed, at any moment and inside any write, and continued: `python kills.py FOLDER POINTS MOMENTS`.

A run is trained, then evaluated: one protocol that trains a classifier, with state of its own, and one that does not.
Every change that either command makes to its files is a point: a write, half of which is then made, a sync, a rename, a
removal, a new folder. First an uninterrupted run lists them. Then, at as many points as asked for, half of them of the
evaluations, a new run is ended by SIGKILL and continued; and as many runs as asked for are killed at random moments,
most of them several times, and continued. What is left must be that of the uninterrupted run to the bit: training
state, metrics, backbone, cached features and results. Prints one line of JSON.
"""

import builtins
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save

from tico_ssl import evaluate, pretrain
from tico_ssl.evaluations._classification import training
from tico_ssl.features import cache
from tico_ssl.results.run_folder import Run
from tico_ssl.training.checkpoint import read_checkpoint
from tiny import TINY

SHORT = {"epochs": 3, "least_steps": 0, "batch_size": 32, "lrs": [0.1, 0.4], "precision": "fp32"}
PROTOCOLS: dict[str, dict] = {"linear-augmented": SHORT, "rankme": {}}
ON_THE_WAY = ("training.pretrain", "evaluations.linear_augmented", "evaluations.rankme")
for name in ("torch.utils.tensorboard", *(f"tico_ssl.{name}" for name in ON_THE_WAY)):
    importlib.import_module(name)  # once, before processes are forked

SETTINGS = TINY | {"training.log_every_steps": 2, "training.checkpoint_seconds": 0.0}  # a checkpoint per epoch
training.CHECKPOINT_SECONDS = -1.0  # the same for classifiers
CLOCK = ("seconds", "images_per_second", "data_wait")
OF_EVALUATIONS = ("results.jsonl", "features", "evaluations")


class Points:
    """Counts the changes of files in a folder, by name, and ends the process at the one of a number."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.passed = str(folder), fatal, list[str]()
        for name in ("fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, self.watched(name, getattr(os, name)))
        self.open, self.save_file = io.open, cache.save_file
        builtins.open = io.open = self.opened
        cache.save_file = self.saved

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

    def saved(self, tensors, path, metadata):
        """As safetensors does it, in a file that it renames."""
        if self.reach("write features"):
            content = save(tensors, metadata)
            Path(path).with_name(".tmpAbCdEf").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        self.save_file(tensors, path, metadata)


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


def trained(folder: Path) -> None:
    """Make the run, or go on with it."""
    pretrain("demo", out=folder, overrides=SETTINGS, resume=True)


def evaluated(folder: Path) -> None:
    """Evaluate the run by the protocols of which there is no result."""
    done = {result["protocol"] for result in Run(folder).results()}
    for protocol, settings in PROTOCOLS.items():
        if protocol not in done:
            evaluate(folder, protocol, overrides=settings)


COMMANDS = {"pretrain": trained, "evaluate": evaluated}


def start(folder: Path, *watched: str, fatal: int | None = None) -> int:
    """A process that carries out both commands; of those that are watched, the points are listed or one is fatal."""
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(folder.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        for name, command in COMMANDS.items():
            points = Points(folder, fatal) if name in watched else None
            command(folder)
            if points is not None:
                (folder.parent / f"{name}.json").write_text(json.dumps(points.passed))
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
        "features": {path.name: path.read_bytes() for path in folder.glob("features/*.safetensors")},
        "results": [{key: value for key, value in line.items() if key != "seconds"} for line in run.results()],
        # Several commands may fill the cache of features at once, so none removes what another may be writing.
        "temporary files": sorted(path.name for path in folder.rglob("*.tmp") if path.parent.name != "features"),
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


def prepared(folder: Path, whole: Path, command: str) -> Path:
    """The folder of a run as it is before a command: without anything, or trained and not evaluated."""
    if command == "evaluate":
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*OF_EVALUATIONS))
    return folder


def killed_inside(home: Path, command: str, count: int, whole: dict) -> tuple[int, int, list[str]]:
    """Kill a command at so many of its points, and go on. Returns how many points there are, how many runs were killed,
    and what is wrong."""
    every: list[str] = json.loads((home / f"{command}.json").read_text())
    kills, failures = 0, list[str]()
    for number in spread(every, count):
        folder, name = home / f"{command}-{number}", f"{command} {number}, {every[number]}"
        code = ended(start(prepared(folder, home / "whole", command), command, fatal=number))
        kills += code == -signal.SIGKILL
        if code != -signal.SIGKILL:
            failures.append(f"{name}: not reached, exit code {code}")
        failures += judge(folder, whole, name)
    return len(every), kills, failures


def killed_at_moments(home: Path, moments: int, seconds: float, whole: dict) -> tuple[int, list[str]]:
    """Kill so many runs at random moments, most of them several times, and go on."""
    kills, failures = 0, list[str]()
    for number in range(moments):
        folder = home / f"moment-{number}"
        while (pid := start(folder)) and random.random() < 0.8:
            time.sleep(random.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            kills += ended(pid) == -signal.SIGKILL
        ended(pid)
        failures += judge(folder, whole, f"moment {number}")
    return kills, failures


def main() -> None:
    home, points, moments = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    random.seed(points + moments)
    begun = time.perf_counter()
    assert ended(start(home / "whole", *COMMANDS)) == 0
    seconds, whole = time.perf_counter() - begun, left(home / "whole")
    found: dict[str, int] = {}
    kills, failures = killed_at_moments(home, moments, seconds, whole)
    for command, count in (("pretrain", points - points // 2), ("evaluate", points // 2)):
        found[command], more, wrong = killed_inside(home, command, count, whole)
        kills, failures = kills + more, failures + wrong
    print(json.dumps({"points": found, "tried": points, "kills": kills, "failures": failures}))


if __name__ == "__main__":
    main()
