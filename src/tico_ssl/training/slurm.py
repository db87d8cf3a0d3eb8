"""Pretraining as a job of SLURM. Nothing here imports torch before the job runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tico_ssl.config.recipe import dump_recipe
from tico_ssl.data.given import Given
from tico_ssl.runtime import slurm
from tico_ssl.runtime.errors import UserError
from tico_ssl.training.start import checked, pretrain


@dataclass(frozen=True)
class Pretraining(slurm.Work):
    """A run, with every setting as it was when it was submitted."""

    recipe: dict[str, Any]
    out: str

    def work(self) -> None:
        pretrain(self.recipe, out=self.out, resume=True)


def submit_pretraining(
    asked: str,
    recipe: str | Path | Mapping[str, Any],
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Check a run and submit it as a job: what was done, in words."""
    wanted = slurm.wanted(asked)
    if overwrite:
        raise UserError("--slurm goes on with a run whenever its job is queued again: remove the folder yourself")
    loaded, run = checked(recipe, data, out, overrides, resume)
    slurm.require_slurm()
    name = run.folder.resolve().name
    if name in (waiting := slurm.queued(run.folder)):
        raise UserError(f"{run.folder} has a job already: {waiting[name]} (`scancel {waiting[name]}` ends it)")
    run.folder.mkdir(parents=True, exist_ok=True)
    work = Pretraining(yaml.safe_load(dump_recipe(loaded)), str(run.folder.resolve()))
    job = slurm.submit(run.folder, name, {name: work}, wanted)[name]
    return [
        f"submitted  job {job}: {wanted}",
        f"log        {slurm.log_of(run.folder, job)}",
        f"follow     tail -F {slurm.log_of(run.folder, job)}; squeue --job {job}",
        f"stop       scancel {job}, which ends it with a checkpoint; the same command with --resume goes on",
    ]
