"""Successive halving: many variants in short runs, then the best of them in longer ones, each from the start.

A round is a study of its own in a folder `round-N`, so it resumes, and its table stays. What was kept, and by which
numbers, is written to halving.json.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tico_ssl.config.study import Budget, Halving, Job, Study, jobs
from tico_ssl.results.metrics import all_of_each
from tico_ssl.results.study_state import round_folder
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted
from tico_ssl.studies.table import Summary

if TYPE_CHECKING:
    from tico_ssl.studies import Workshop


STORY = "halving.json"


def budgets(study: Study) -> list[Budget]:
    """The budget of every round; the last one has the study's."""
    assert study.halving is not None
    assert study.budget is not None
    shares = [study.halving.keep ** (study.halving.rounds - number) for number in range(1, study.halving.rounds + 1)]
    return [_scaled(study.budget, share) for share in shares]


def _scaled(budget: Budget, share: float) -> Budget:
    if budget.seconds is not None:
        return budget.model_copy(update={"seconds": share * budget.seconds})
    assert budget.epochs is not None
    return budget.model_copy(update={"epochs": max(1, round(share * budget.epochs))})


def halved(work: "Workshop", chosen: Iterable[Job], width: int) -> Summary:
    """Carry out all rounds; the results of the last one."""
    study, names = work.study, list(dict.fromkeys(job.variant.name for job in chosen))
    assert study.halving is not None
    rounds, story = budgets(study), []
    if not all(variant.load().data.held_out for variant in work.variants):
        say("note: variants are chosen by the images that they are evaluated on; data.held_out=0.1 chooses by others")
    work.begin()
    for number, budget in enumerate(rounds, 1):
        folder = round_folder(work.folder, number)
        _keep_costs(round_folder(work.folder, number - 1), folder)
        here = work.round(number)
        here.require_same()  # again: costs may be known only now
        say(f"round {number} of {len(rounds)}: {counted(len(names), 'variant')}, {in_words(budget)}")
        summary = here.run(jobs(here.study, names), width)
        ranked = ranking(summary, study.halving)
        if not ranked:
            raise UserError(f"round {number}: no run has a result of {study.halving.by}, see {folder}/logs")
        names = [name for name, _ in ranked][: max(1, round(study.halving.keep * len(names)))]
        story.append({"round": number, "budget": budget.model_dump(exclude_none=True), "by": study.halving.by})
        story[-1] |= {"ranking": ranked} if number == len(rounds) else {"ranking": ranked, "kept": names}
        write_atomically(work.folder / STORY, json.dumps(story, indent=2) + "\n")
        word, shown = ("best", ranked[:1]) if number == len(rounds) else ("kept", ranked[: len(names)])
        say(f"{word} by {study.halving.by}: {', '.join(f'{name} {value:.1f}' for name, value in shown)}")
    return summary


def on_to(work: "Workshop", number: int) -> list[str] | None:
    """The variants of a round of a study, from 1 on; None: the round before has not chosen them yet."""
    if number == 1:
        return [variant.name for variant in work.variants]
    try:
        kept: list[str] = json.loads((work.folder / STORY).read_bytes())[number - 2]["kept"]
    except (OSError, ValueError, LookupError, TypeError):  # not so far, or somebody has edited it
        return None
    return kept


def ranking(summary: Summary, halving: Halving) -> list[tuple[str, float]]:
    """The variants with a result, the best first, by the mean over seeds."""
    protocol, name = halving.by.split()
    values = {
        row.run: spread["trained"].mean
        for row in summary.rows
        if "trained" in (spread := row.numbers.get(protocol, {}).get(name, {}))
    }
    sign = next((one.metric.sign for one in all_of_each([(protocol, [name])])), 1)
    return sorted(values.items(), key=lambda item: -sign * item[1])


def _keep_costs(before: Path, folder: Path) -> None:
    """Measurements of a round hold for the next."""
    (folder / "costs").mkdir(parents=True, exist_ok=True)
    for file in sorted((before / "costs").glob("*.json")):
        if not (folder / "costs" / file.name).exists():
            shutil.copy(file, folder / "costs")


def in_words(budget: Budget) -> str:
    """How long every run of a round trains."""
    words = counted(budget.epochs, "epoch") if budget.epochs is not None else f"{budget.seconds:g} s"
    return f"the time of {words} of {budget.epochs_of}" if budget.epochs_of is not None else words
