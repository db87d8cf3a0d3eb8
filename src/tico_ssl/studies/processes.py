"""Several processes in parallel, with one display, each stopped with a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.progress import Progress, TaskID

from tico_ssl.runtime.errors import Interrupted, signal_name
from tico_ssl.runtime.progress import bar, say, words
from tico_ssl.runtime.wording import counted

LOOK_SECONDS = 0.2
SIDE_BY_SIDE_ON_A_GPU = 3
THREADS_OF_A_RUN = 4  # on a CPU: more gain little on small images


@dataclass(frozen=True)
class Work:
    """A task for a process of its own."""

    name: str
    arguments: Sequence[str]
    log: Path
    size: int
    """Size of the task, in epochs or another unit."""
    share: Callable[[], float]
    """Progress from 0 to 1."""
    outcome: Callable[[], str]
    """The result in a few words, after success."""


@dataclass
class _Process:
    work: Work
    process: subprocess.Popen[bytes]
    log_start: int
    task: TaskID
    slot: int


def default_width() -> int:
    """Default number of parallel runs on this machine."""
    return SIDE_BY_SIDE_ON_A_GPU * gpus() or max(1, _threads() // THREADS_OF_A_RUN)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def gpus() -> int:
    """Number of GPUs to distribute runs over; TICO_DEVICE selects one."""
    import torch

    from tico_ssl.runtime.device import choose_device

    if choose_device().type != "cuda":
        return 0
    return 1 if os.environ.get("TICO_DEVICE") else torch.cuda.device_count()


def environment_of(slot: int, width: int, environment: Mapping[str, str], threads: int, devices: int) -> dict[str, str]:
    """The environment of one of several processes: its share of the threads and workers, and one of the GPUs."""
    changed = dict(environment) | {
        "OMP_NUM_THREADS": str(max(1, threads // width)),
        "LOCAL_WORLD_SIZE": str(width),  # divides the number of decoding workers
    }
    if devices > 1:
        visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        changed["CUDA_VISIBLE_DEVICES"] = visible[slot % devices]
    return changed


def run_all(works: Sequence[Work], width: int, share_of: int, label: str) -> dict[str, str]:
    """Run all tasks, `width` at a time, each with one of `share_of` shares of the machine. Returns why tasks failed, by
    name. On Ctrl-C or SIGTERM, stops the processes, waits for them and raises KeyboardInterrupt."""
    waiting, running, failures = list(works), list[_Process](), dict[str, str]()
    ended = 0
    with _sigterm_as_interrupt(), bar(words("status")) as progress:
        total = progress.add_task(label, total=len(works), status="")
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    slot = min(set(range(width)) - {other.slot for other in running})
                    running.append(_start(waiting.pop(0), slot, share_of, progress))
                time.sleep(LOOK_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    progress.remove_task(one.task)
                    ended += 1
                    if reason := _failure(one):
                        failures[one.work.name] = reason
                    say(f"{label} {ended}/{len(works)}  {one.work.name}: {reason or one.work.outcome()}")
                _show(progress, total, running, ended, len(failures))
        except BaseException:  # also a full disk: no run is left without its study
            _stop(running)
            raise
    return failures


def _start(work: Work, slot: int, width: int, progress: Progress) -> _Process:
    environment = environment_of(slot, width, os.environ, _threads(), gpus())
    work.log.parent.mkdir(parents=True, exist_ok=True)
    with work.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", *work.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops the others
        )
    task = progress.add_task(f"  {work.name}", total=work.size, status="")
    return _Process(work, process, start, task, slot)


def _show(progress: Progress, total: TaskID, running: list[_Process], ended: int, failed: int) -> None:
    if progress.disable:
        return
    shares = [one.work.share() for one in running]
    for one, share in zip(running, shares):
        status = "evaluating" if share == 1 else ""
        progress.update(one.task, completed=share * one.work.size, status=status)
    progress.update(total, completed=ended + sum(shares), status=f"{failed} failed" if failed else "")


def _failure(one: _Process) -> str | None:
    """Why a process failed, in one line: the last error that it printed."""
    code = one.process.returncode
    if code == 0:
        return None
    if code < 0:
        return f"ended by {signal_name(-code)}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    with one.work.log.open("rb") as log:
        log.seek(one.log_start)
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if code in (130, 143):
        return "was stopped"
    return lines[-1].removeprefix("error: ") if lines else f"ended with exit code {code}"


def _stop(running: list[_Process]) -> None:
    """Stop processes, and wait until they have written their checkpoints; a second Ctrl-C does not wait."""
    for one in running:
        one.process.terminate()
    if running:
        say(f"stopping {counted(len(running), 'run')} after a checkpoint; Ctrl-C again to stop at once")
    try:
        for one in running:
            one.process.wait()
    except KeyboardInterrupt:
        for one in running:
            one.process.kill()
            one.process.wait()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, a scheduler's warning, as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number=number)

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
