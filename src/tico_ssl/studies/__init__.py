"""Studies: many runs compared, from one YAML file to one table. See docs/studies.md.

plan       the study's definition and its runs
cost       the measured cost of a run, and the epochs that a budget buys
timing     the time of a step on an idle machine
processes  several runs in parallel
worker     one run in its own process
slurm      every run as a job of its own
table      the results
halving    rounds in which the best variants are chosen
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tico_ssl.config.study import Job, Study, Variant, check, dump_study, expand, jobs, load_study
from tico_ssl.data.given import as_source
from tico_ssl.results.run_folder import Run, changed, differences, environment, flattened
from tico_ssl.results.study_state import State, last_epoch, last_round, round_folder, state_of, study_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.launcher import launched
from tico_ssl.runtime.locks import LOCK, alone_in, locks_exist
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.slurm import JOBS
from tico_ssl.runtime.wording import counted
from tico_ssl.studies import processes, table
from tico_ssl.studies.cost import epochs_for, read_cost, read_costs, work_of
from tico_ssl.studies.halving import budgets, halved, in_words, on_to
from tico_ssl.studies.table import Summary

WORKER = "tico_ssl.studies.worker"


def study(
    name: str | Path,
    data: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    side_by_side: int | None = None,
) -> Summary:
    """Run the unfinished runs of a study, write its table, and return its contents. The same call resumes after
    an interruption. A run that fails does not stop the others: see `Summary.failures`.

    `name` is a packaged study or a YAML file. `data` and `overrides` hold for all runs; `out` is the folder, by default
    runs/study-NAME. `only` names the runs to run, by default all; `side_by_side` is how many at a time, by default 3
    per GPU, or 1 per 4 threads of a CPU.

        summary = study("mine.yaml")
        {row.run: row.numbers["knn"]["top1_k20"]["trained"].mean for row in summary.rows}
    """
    work = Workshop.open(name, data, out, overrides)
    chosen = jobs(work.study, list(only))
    if launched():
        raise UserError("a study starts its own processes: run it without torchrun")
    with work.alone():
        width = side_by_side or processes.default_width()
        return work.run(chosen, width) if work.study.halving is None else halved(work, chosen, width)


class Workshop:
    """A study, its folder, and the state of its runs."""

    def __init__(self, name: str, study: Study, folder: Path) -> None:
        self.name, self.study, self.folder = name, study, folder
        self.variants = expand(study)
        check(study, self.variants)
        self.costs = read_costs(folder, self.variants)
        self.failed: dict[str, str] = {}

    @classmethod
    def open(
        cls,
        name: str | Path,
        data: str | Sequence[str] | None = None,
        out: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> "Workshop":
        """Read and check a study, including existing runs; nothing is written."""
        changes = dict(overrides or {}) | ({} if data is None else {"data.source": as_source(data)})
        stem = Path(name).stem if Path(name).suffix in (".yaml", ".yml") else str(name)
        folder = Path(out).expanduser() if out is not None else Path("runs") / f"study-{stem}"
        workshop = cls(stem, load_study(name, changes), folder)
        workshop.require_own_folder()
        workshop.require_same()
        return workshop

    def round(self, number: int) -> "Workshop":
        """A round of halving, which is a study of its own, from 1 on."""
        parts = {"halving": None, "budget": budgets(self.study)[number - 1]}
        return Workshop(self.name, self.study.model_copy(update=parts), round_folder(self.folder, number))

    def require_own_folder(self) -> None:
        """Refuse a folder that has other things in it than a study; runs of the study may be there before it."""
        if not self.folder.is_dir() or study_file(self.folder).is_file() or last_round(self.folder) is not None:
            return
        known = {LOCK, JOBS, "costs", "logs", *(job.name for job in jobs(self.study))}
        if any(path.name not in known and path.suffix != ".tmp" for path in self.folder.iterdir()):
            raise UserError(
                f"{self.folder} exists and is not the folder of a study (it has no study.yaml): choose another --out"
            )

    def require_same(self) -> None:
        """Refuse settings that are not those of the runs that exist, as rows must compare."""
        for job in jobs(self.study):
            run = self.run_of(job)
            if run.recipe_file.is_file() and self.timed(job.variant):
                recipe = job.variant.load(job.seed, self.epochs(job.variant))
                self._refuse(run.folder, changed(run, recipe, longer=False))
        if (begun := last_round(self.folder)) is not None and study_file(self.folder).is_file():
            before, after = (_halving_of(one) for one in (load_study(study_file(self.folder)), self.study))
            self._refuse(begun, differences(before, after))  # may change what is kept, and no recipe
        for number in range(1, self.study.halving.rounds + 1 if self.study.halving else 1):
            self.round(number).require_same()

    def _refuse(self, place: Path, found: str) -> None:
        if found:
            raise UserError(f"{place} was made by another study: {found}; choose another --out")

    def timed(self, variant: Variant) -> bool:
        """Whether the number of epochs of a variant is known."""
        budget = self.study.budget
        if budget is None or not budget.timed:
            return True
        return {variant.name, budget.epochs_of or variant.name} <= self.costs.keys()

    def epochs(self, variant: Variant) -> int:
        """The epochs of a variant whose number of epochs is known."""
        return epochs_for(self.study.budget, variant, self.costs) or variant.load().training.epochs

    def run_of(self, job: Job) -> Run:
        """The run folder of a job."""
        return Run(self.folder / job.name)

    def state(self, job: Job) -> State:
        """The state of a job."""
        return state_of(self.study, self.run_of(job), self.epochs(job.variant) if self.timed(job.variant) else None)

    def run(self, chosen: list[Job], width: int) -> Summary:
        """Time the variants that need it, carry out unfinished runs, and write the table."""
        self.require_backbones([job for job in chosen if not self.state(job).done])
        self.begin()
        try:
            self._time([job for job in chosen if not self.state(job).done], width)
            open_jobs = [job for job in chosen if job.name not in self.failed and not self.state(job).done]
            if done := len(chosen) - len(open_jobs) - len(self.failed):
                say(f"{done} of {counted(len(chosen), 'run')} are done already")
            self.failed |= processes.run_all([self._work(job) for job in open_jobs], width, width, "runs")
        finally:
            summary = self.summary()
            table.write(summary)
        return summary

    def require_backbones(self, open_jobs: Sequence[Job]) -> None:
        """Build the network of each kind that these runs have, before any of them begins: only its library knows
        whether there is such a model."""
        recipes = [(name, variant.load()) for name, variant in {j.variant.name: j.variant for j in open_jobs}.items()]
        kinds = {recipe.backbone.model_dump_json(): (name, recipe) for name, recipe in reversed(recipes)}
        if not kinds:
            return

        import torch

        from tico_ssl.networks.backbones import build_network

        with torch.random.fork_rng(devices=[]):
            for name, recipe in reversed(kinds.values()):
                try:
                    build_network(recipe.backbone, recipe.data.image_size)
                except UserError as error:
                    raise UserError(f"run {name}: {error}") from error

    def begin(self) -> None:
        """Write down what is studied."""
        costs = [] if self.study.halving else ["costs"]  # otherwise those of the rounds
        self.folder.joinpath(*costs).mkdir(parents=True, exist_ok=True)
        write_atomically(study_file(self.folder), dump_study(self.study))
        write_atomically(self.folder / "environment.json", json.dumps(environment(), indent=2) + "\n")

    def untimed(self, open_jobs: list[Job], width: int) -> list[Variant]:
        """The variants whose cost matters and is unknown; of those with equal steps, one."""
        budget = self.study.budget
        if width == 1 and not (budget and budget.timed):
            return []  # a run without parallel runs times itself
        wanted = {job.variant.name for job in open_jobs} | ({budget.epochs_of} if open_jobs and budget else set())
        unknown = [variant for variant in self.variants if variant.name in wanted and variant.name not in self.costs]
        return [*{work_of(variant): variant for variant in reversed(unknown)}.values()][::-1]

    def _time(self, open_jobs: list[Job], width: int) -> None:
        """Time the variants whose cost matters and is unknown, one after the other."""
        budget, missing = self.study.budget, self.untimed(open_jobs, width)
        if not missing:
            return
        works = [
            processes.Work(
                variant.name,
                (WORKER, "time", str(self.folder), variant.name),
                self.folder / "logs" / f"{variant.name}-timing.log",
                size=1,
                share=lambda: 0.0,
                outcome=functools.partial(_speed, self.folder, variant),
            )
            for variant in missing
        ]
        # On a GPU the next process may start meanwhile: the measurement itself waits for a lock.
        at_a_time = 2 if processes.gpus() == 1 and locks_exist() else 1
        failed = processes.run_all(works, at_a_time, width, "timing")
        self.costs = read_costs(self.folder, self.variants)
        reasons = {work_of(variant): failed[variant.name] for variant in missing if variant.name in failed}
        failed = {v.name: reasons[work] for v in self.variants if reasons and (work := work_of(v)) in reasons}
        if budget and budget.epochs_of in failed:
            raise UserError(f"run {budget.epochs_of}, whose time is the budget, failed: {failed[budget.epochs_of]}")
        self.failed |= {job.name: failed[job.variant.name] for job in open_jobs if job.variant.name in failed}

    def _work(self, job: Job) -> processes.Work:
        run, epochs = self.run_of(job), self.epochs(job.variant)
        return processes.Work(
            job.name,
            (WORKER, "run", str(self.folder), job.name),
            self.folder / "logs" / f"{job.name}.log",
            size=epochs,
            share=lambda: min(1.0, last_epoch(run) / epochs),
            outcome=lambda: str(self.state(job)),
        )

    def summary(self) -> Summary:
        """The results so far."""
        done: dict[str, list[table.Measured]] = {variant.name: [] for variant in self.variants}
        failed: dict[str, dict[str, str]] = {variant.name: {} for variant in self.variants}
        for job in jobs(self.study):
            if self.state(job).done:
                result = table.measured(self.study, self.run_of(job), job.seed, self.costs.get(job.variant.name))
                done[job.variant.name].append(result)
            elif job.name in self.failed:
                failed[job.variant.name][job.name] = self.failed[job.name]
        return table.summarise(self.name, self.study, self.folder, self.variants, done, failed)

    def show_plan(self, chosen: list[Job]) -> None:
        """Print the runs and their states, those of every round of halving."""
        if self.study.halving is not None:
            self._show_rounds(chosen, self.study.halving.rounds)
            return
        lines = []
        for job in chosen:
            own = {key: value for key, value in job.variant.changes.items() if self.study.overrides.get(key) != value}
            epochs = counted(self.epochs(job.variant), "epoch") if self.timed(job.variant) else "by time"
            changes = " ".join(f"{key}={value}" for key, value in own.items())
            lines.append((job.name, str(self.state(job)), epochs, f"{job.variant.recipe} {changes}".rstrip()))
        widths = [max(map(len, column)) for column in zip(*lines)]
        for line in lines:
            say("  ".join(f"{text:<{width}}" for text, width in zip(line, widths)).rstrip())

    def _show_rounds(self, chosen: list[Job], rounds: int) -> None:
        asked = {job.variant.name for job in chosen}
        for number, budget in enumerate(budgets(self.study), 1):
            names = on_to(self, number)
            what = "not chosen yet" if names is None else counted(len(names), "variant")
            say(f"round {number} of {rounds}: {what}, {in_words(budget)}")
            here = self.round(number)
            if shown := [job for job in jobs(here.study) if job.variant.name in asked & {*(names or [])}]:
                here.show_plan(shown)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the study's folder."""
        if self.folder.is_file() or any(parent.is_file() for parent in self.folder.parents):
            raise UserError(f"{self.folder} cannot be a folder: there is a file of that name")
        with alone_in(self.folder, f"another `tico study` is running in {self.folder}"):
            yield


def _halving_of(study: Study) -> dict[str, Any]:
    """What the rounds of a study depend on beside the recipes."""
    return flattened(study.model_dump(mode="json", include={"halving", "budget"}))


def _speed(folder: Path, variant: Variant) -> str:
    cost = read_cost(folder, variant)
    return "" if cost is None else f"{cost.images_per_second:,.0f} images/s alone"
