"""Progress of the runs of a study, read from their folders."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tico_ssl.config.study import Study, protocol_settings
from tico_ssl.results.record import is_result
from tico_ssl.results.run_folder import Run

TAIL = 8_192  # bytes at the end of metrics.jsonl that hold its last lines
ROUND = re.compile(r"round-(\d+)")  # the folder of a round of halving


@dataclass(frozen=True)
class State:
    """Progress of a run."""

    epoch: float
    epochs: int | None
    missing: tuple[str, ...]

    @property
    def trained(self) -> bool:
        """Whether training is complete."""
        return self.epochs is not None and self.epoch >= self.epochs

    @property
    def done(self) -> bool:
        """Trained, and evaluated by every protocol."""
        return self.trained and not self.missing

    def __str__(self) -> str:
        if self.done:
            return "done"
        if self.trained:
            return f"trained, without {', '.join(self.missing)}"
        of = "" if self.epochs is None else f" of {self.epochs}"
        return f"epoch {self.epoch:.4g}{of}" if self.epoch else "not started"


def study_file(folder: Path) -> Path:
    """The study as it was run."""
    return folder / "study.yaml"


def round_folder(folder: Path, number: int) -> Path:
    """The study that is a round of halving, from 1 on."""
    return folder / f"round-{number}"


def last_round(folder: Path) -> Path | None:
    """The last round of halving of which a run has begun; None: there is none."""
    names = {file.parent.parent.name for file in folder.glob("round-*/*/recipe.yaml")}
    numbers = [int(found[1]) for name in names if (found := ROUND.fullmatch(name))]
    return round_folder(folder, max(numbers)) if numbers else None


def state_of(study: Study, run: Run, epochs: int | None) -> State:
    """Progress of a run with this number of epochs."""
    epoch = last_epoch(run)
    trained = epochs is not None and epoch >= epochs
    return State(epoch, epochs, tuple(unevaluated(study, run)) if trained else tuple(study.protocols))


def unevaluated(study: Study, run: Run) -> list[str]:
    """Protocols without a result for the current backbone and the study's settings."""
    results = results_of(study, run)
    return [protocol for protocol in study.protocols if protocol not in results]


def results_of(study: Study, run: Run) -> dict[str, dict[str, Any]]:
    """The latest result of each protocol for the current backbone and the study's settings."""
    checkpoint = run.checkpoint()
    wanted = {protocol: protocol_settings(study, protocol) for protocol in study.protocols}
    return {
        result["protocol"]: result
        for result in run.results()
        if is_result(result)
        and result.get("checkpoint") == checkpoint
        and wanted.get(result["protocol"]) == result.get("settings", {})
    }


def last_epoch(run: Run) -> float:
    """The epoch of the last logged step, without reading the whole file."""
    if not run.metrics_file.is_file():
        return 0.0
    with run.metrics_file.open("rb") as file:
        file.seek(max(0, run.metrics_file.stat().st_size - TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        try:
            return float(json.loads(line)["epoch"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # cut off or damaged
            continue
    return 0.0
