"""Reading run folders, in whatever state the run is."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.results.record import Record
from tico_ssl.results.run_folder import open_run
from tico_ssl.results.study_state import study_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import read_json_lines


def read_record(folder: str | Path) -> Record:
    """Read a run. Missing files count as empty."""
    run = open_run(folder)
    recipe = parse_yaml(run.recipe_file.read_text(encoding="utf-8"), str(run.recipe_file))
    if not isinstance(recipe, dict):
        raise UserError(f"{run.recipe_file}: not a recipe")
    files = [run.recipe_file, run.metrics_file, run.folder / "train.log", run.checkpoint_file]
    return Record(
        run=run,
        recipe=recipe,
        environment=_json(run.folder / "environment.json"),
        metrics=[line for line in run.metrics() if isinstance(line, dict) and "step" in line],
        spectrum=[line for line in read_json_lines(run.spectrum_file) if {"epoch", "ranks", "shares"} <= set(line)],
        results=[line for line in run.results() if {"protocol", "numbers"} <= set(line)],
        bad_files=read_json_lines(run.bad_files_file),
        warnings=_warnings(run.folder / "train.log"),
        checkpoint=run.checkpoint(),
        last_sign=max(file.stat().st_mtime for file in files if file.is_file()),
    )


def is_study(folder: str | Path) -> bool:
    """Whether this is the folder of a study."""
    return study_file(Path(folder).expanduser()).is_file()


def read_records(folders: Sequence[str | Path]) -> list[Record]:
    """Runs and the runs of studies, each once; a study's runs in its order, with the times that it measured."""
    found: dict[Path, Record] = {}
    for folder in folders:
        path = Path(folder).expanduser()
        records = _runs_of(path) if is_study(path) else [read_record(path)]
        found |= {record.run.folder.resolve(): record for record in records}
    return list(found.values())


def failures(folder: str | Path) -> dict[str, str]:
    """Reasons of failed runs of a study, by name."""
    return {name: reason for row in _rows(Path(folder).expanduser()).values() for name, reason in row["failed"].items()}


def _runs_of(study: Path) -> list[Record]:
    inside = sorted(file.parent for file in study.glob("*/recipe.yaml"))
    if not inside:
        raise UserError(f"{study}: no run of this study has started")
    rows = _rows(study)
    order = list(rows)
    variants = {path: path.name.rpartition("-seed")[0] for path in inside}
    inside.sort(key=lambda path: order.index(variants[path]) if variants[path] in order else len(order))
    return [_timed(read_record(path), rows.get(variants[path], {})) for path in inside]


def _timed(record: Record, row: dict[str, Any]) -> Record:
    if not record.finished or not row.get("seconds") or not row.get("images_per_second"):
        return record
    return replace(record, timed=(row["seconds"], row["images_per_second"]))


def _rows(study: Path) -> dict[str, dict[str, Any]]:
    """The rows of a study's results.json, by variant."""
    return {row["run"]: row for row in _json(study / "results.json").get("rows", [])}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _warnings(log: Path) -> list[str]:
    """Warnings in the log, without repetition and time stamps."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = [re.sub(r"^\S+ \S+  ", "", line) for line in lines if "warning:" in line]
    return list(dict.fromkeys(found))
