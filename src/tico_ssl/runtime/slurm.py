"""SLURM: what a job asks for, how it is submitted (by submitit), and how it is queued again; without torch.

A job is warned before its time is over or another one takes its place. Work that goes on from a checkpoint then saves
one and ends, and its job is queued again.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tico_ssl.runtime.errors import Interrupted, UserError, suggestion, told
from tico_ssl.runtime.extras import install_command
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.launcher import adopt_srun
from tico_ssl.runtime.printing import accept_all_text
from tico_ssl.runtime.progress import is_main, say
from tico_ssl.runtime.wording import counted

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

JOBS = "slurm"  # the folder of scripts and logs, in that of the run or study
NUMBERS = {"nodes": "nodes", "gpus": "gpus_per_node", "tasks": "ntasks_per_node", "cpus": "cpus_per_task"}
TEXTS = ("partition", "account", "qos", "constraint", "nodelist", "exclude", "gres", "mem")
DAY = 24 * 60
WARNING_SECONDS = 120  # before the time of a job is over
ENDING_SECONDS = 120  # after the end of the first process of a job, in which the others may end by themselves


@dataclass(frozen=True)
class Wanted:
    """What each job asks for."""

    nodes: int = 1
    tasks: int = 1
    """Processes per node."""
    minutes: int = DAY
    numbers: dict[str, int] = field(default_factory=dict)
    """Other numbers, in submitit's words."""
    texts: dict[str, str] = field(default_factory=dict)
    """Other options of sbatch."""

    def parameters(self) -> dict[str, Any]:
        """For an executor of submitit."""
        return self.numbers | {
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks,
            "time": self.minutes,
            "signal_delay_s": min(WARNING_SECONDS, self.minutes * 60 // 4),
            "stderr_to_stdout": True,
            "srun_args": [f"--wait={ENDING_SECONDS}"],
        }

    def __str__(self) -> str:
        """In a few words."""
        where = f"{counted(self.nodes, 'node')}, {counted(self.tasks, 'process')} on each"
        return f"{where}, {counted(self.minutes, 'minute')} at a time"


def wanted(text: str) -> Wanted:
    """Parse partition=gpu,nodes=4,gpus=8,time=12:00:00."""
    values: dict[str, Any] = {}
    for word in re.split(r",(?![^\[]*\])", text):  # commas in brackets belong to a list of hosts
        key, sign, value = word.strip().partition("=")
        if key not in (*NUMBERS, *TEXTS, "time"):
            raise UserError(f"--slurm {key}: no such key{suggestion(key, (*NUMBERS, *TEXTS, 'time'))}")
        if not sign or not value:
            raise UserError(f"--slurm {key}: give a value, {key}=...")
        values[key] = value
    numbers = {key: _count(key, values.pop(key)) for key in NUMBERS if key in values}
    minutes = minutes_of(values.pop("time")) if "time" in values else DAY
    nodes, tasks = numbers.pop("nodes", 1), numbers.pop("tasks", numbers.get("gpus", 1))
    return Wanted(nodes, tasks, minutes, {NUMBERS[key]: number for key, number in numbers.items()}, values)


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise UserError(f"--slurm {key}={text}: a number from 1 is expected")
    return int(text)


def minutes_of(text: str) -> int:
    """A time as SLURM writes it, in whole minutes: 90, 90:00, 1:30:00, 2-12, 2-12:30, 2-12:30:00."""
    found = re.fullmatch(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))", text)
    if found is None:
        raise UserError(f"--slurm time={text}: minutes, HH:MM:SS or DAYS-HH:MM:SS are expected")
    days, hours, minutes, seconds, plain_hours, plain_minutes, plain_seconds, alone = (
        int(n or 0) for n in found.groups()
    )
    total = 60 * (24 * days + hours + plain_hours) + minutes + plain_minutes + alone
    total += -(-(seconds + plain_seconds) // 60)
    if total < 1:
        raise UserError(f"--slurm time={text}: at least a minute is needed")
    return total


class Work:
    """What a job does: begin, or go on where it was interrupted. It is pickled when it is submitted."""

    def work(self) -> None:
        """Raises `Interrupted` after a request to stop, when the state is saved."""
        raise NotImplementedError

    def __call__(self) -> None:
        carry_out(self.work)

    def checkpoint(self) -> "DelayedSubmission":
        """While there is nothing to save, submitit answers a warning: it queues the job again as it is."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def require_slurm() -> None:
    """Refuse where jobs cannot be submitted."""
    if importlib.util.find_spec("submitit") is None:
        raise UserError(f"--slurm needs submitit: {install_command('slurm')}")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError("--slurm: this machine has no SLURM (sbatch and srun are not found)")


def submit(
    home: Path,
    name: str,
    works: Mapping[str, Work],
    asked: Wanted,
    at_once: int | None = None,
    after: str | None = None,
) -> dict[str, str]:
    """Submit works, several as an array of jobs of which `at_once` run, `after` the job of that number. Returns their
    job numbers by name, and keeps them in the folder."""
    import submitit

    folder = (home / JOBS).resolve()
    executor = submitit.SlurmExecutor(folder)
    more: dict[str, Any] = {"requeue": True, **asked.texts}
    if after is not None:
        more |= {"dependency": f"afterok:{after}", "kill-on-invalid-dep": "yes"}
    at_once = min(at_once or len(works), len(works))
    parameters = asked.parameters() | {"job_name": f"tico-{name}", "array_parallelism": at_once}
    executor.update_parameters(**parameters, additional_parameters=more)
    try:
        with executor.batch():
            submitted = [executor.submit(work) for work in works.values()]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise UserError(f"SLURM refused the job: {_last_line(str(error))}") from error
    jobs = dict(zip(works, (job.job_id for job in submitted)))
    write_atomically(folder / "jobs.json", json.dumps(known_jobs(home) | jobs, indent=2) + "\n")
    return jobs


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if "error" in line.lower()), text[:200])


def known_jobs(home: Path) -> dict[str, str]:
    """The jobs that were submitted for a folder, by name."""
    file = home / JOBS / "jobs.json"
    try:
        found: dict[str, str] = json.loads(file.read_bytes())
        return dict(found)
    except (OSError, ValueError):
        return {}


def queued(home: Path) -> dict[str, str]:
    """Those of them that wait or run."""
    known = known_jobs(home)
    if not known:
        return {}
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        raise UserError(f"squeue does not answer: {answer.stderr.strip()}")
    waiting = set(answer.stdout.split())
    return {name: job for name, job in known.items() if job in waiting}


def log_of(home: Path, job: str) -> Path:
    """What the first process of a job writes."""
    return home / JOBS / f"{job}_0_log.out"


def carry_out(work: Callable[[], object]) -> None:
    """Do the work of a job. If it was warned and has kept its state, the job is queued again."""
    accept_all_text()
    adopt_srun()
    try:
        work()
    except Interrupted as stop:
        say(str(stop))
        if _goes_on(stop.exit_code - 128):
            _queue_again()
        sys.exit(stop.exit_code)
    except Exception as error:
        sys.exit(told(error))


def _goes_on(number: int) -> bool:
    """Whether a job that was stopped by a signal is to be queued again: after a warning, and when another job takes its
    place, which SLURM announces by the signal of a cancellation. It queues such a job again itself only if that does
    not end in time."""
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        return True
    return number == signal.SIGTERM and bool(re.search(r" PreemptTime=\d", _scontrol("show", "--oneliner", "job")))


def _queue_again() -> None:
    """Put this job into the queue again: its first process does."""
    if is_main():
        say("this job is queued again")
        _scontrol("requeue")


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words, os.environ["SLURM_JOB_ID"]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
