"""A study as jobs of SLURM: an array with a job per run, and before it one that times the runs if a budget needs that.

Whichever run ends writes the table of all that have ended, so that the last one leaves that of the whole study.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tico_ssl.config.study import jobs, load_study
from tico_ssl.results.study_state import study_file
from tico_ssl.runtime import slurm
from tico_ssl.runtime.errors import UserError, one_line
from tico_ssl.runtime.wording import counted
from tico_ssl.studies import Workshop, table


@dataclass(frozen=True)
class Timing(slurm.Work):
    """Measure the costs of variants, one after the other."""

    folder: str
    variants: tuple[str, ...]

    def work(self) -> None:
        """Those that are known already, from before the job was queued again, are measured again."""
        from tico_ssl.studies.worker import time_variant

        for name in self.variants:
            time_variant(Path(self.folder), name)


@dataclass(frozen=True)
class Running(slurm.Work):
    """Carry out one run, as far as that is not done, and write the table."""

    study: str
    folder: str
    run: str

    def work(self) -> None:
        """A stop, after which the job is queued again, is no failure."""
        from tico_ssl.studies.worker import make_run

        folder = Path(self.folder)
        try:
            make_run(folder, self.run)
        except Exception as error:
            write_table(self.study, folder, self.run, one_line(error) or f"{type(error).__name__}: {error}")
            raise
        write_table(self.study, folder, self.run)


def write_table(study: str, folder: Path, name: str, failure: str | None = None) -> None:
    """Write the table of a study after a run has ended. Failures of others are taken from the table before."""
    from tico_ssl.studies.worker import lock

    with (folder / "costs" / "table.lock").open("w") as alone:
        lock(alone)
        workshop = Workshop(study, load_study(study_file(folder)), folder)
        workshop.failed = _failures(folder)
        workshop.failed.pop(name, None)
        if failure is not None:
            workshop.failed[name] = failure
        table.write(workshop.summary())


def _failures(folder: Path) -> dict[str, str]:
    try:
        rows = json.loads((folder / "results.json").read_bytes())["rows"]
        return {str(name): str(reason) for row in rows for name, reason in row["failed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none yet, or somebody has edited it
        return {}


def submit_study(
    asked: str,
    name: str | Path,
    data: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    at_once: int | None = None,
) -> list[str]:
    """Check a study and submit its unfinished runs that are not in the queue yet: what was done, in words."""
    wanted = slurm.wanted(asked)
    if wanted.nodes * wanted.tasks > 1:
        raise UserError("--slurm of a study: a run of a study is one process, on one node with gpus=1")
    work = Workshop.open(name, data, out, overrides)
    chosen = jobs(work.study, list(only))
    if work.study.halving is not None:
        raise UserError("--slurm: a study with halving chooses its next runs by its last, so it is no single array job")
    slurm.require_slurm()
    with work.alone():
        waiting = slurm.queued(work.folder)
        unfinished = [job for job in chosen if not work.state(job).done]
        open_jobs = [job for job in unfinished if job.name not in waiting]
        done, there = len(chosen) - len(unfinished), len(unfinished) - len(open_jobs)
        lines = [f"{done} of {counted(len(chosen), 'run')} are done, {there} are in the queue already"]
        if not open_jobs:
            return lines
        work.require_backbones(open_jobs)
        work.begin()
        folder = str(work.folder.resolve())
        timing = None
        if untimed := tuple(variant.name for variant in work.untimed(open_jobs, width=1)):
            first = {"timing": Timing(folder, untimed)}
            timing = slurm.submit(work.folder, f"{work.name}-timing", first, wanted)["timing"]
            lines.append(f"submitted  job {timing}, which measures how fast {len(untimed)} of them are")
        works = {job.name: Running(work.name, folder, job.name) for job in open_jobs}
        submitted = slurm.submit(work.folder, work.name, works, wanted, at_once, timing)
    return lines + _told(work.folder, submitted, wanted)


def _told(folder: Path, submitted: dict[str, str], wanted: slurm.Wanted) -> list[str]:
    job = next(iter(submitted.values())).partition("_")[0]
    logs = [f"  {name}  {slurm.log_of(folder, number)}" for name, number in submitted.items()]
    return [
        f"submitted  job {job}: {counted(len(submitted), 'run')}, each on {wanted}; logs:",
        *logs,
        f"follow     squeue --job {job}; {folder}/results.md is written whenever a run ends",
        f"stop       scancel {job}, which ends its runs with checkpoints; the same command submits them again",
    ]
