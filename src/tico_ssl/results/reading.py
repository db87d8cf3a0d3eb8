"""Everything that a run folder says, read once, whatever state the run is in."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tico_ssl.config.recipe import parse_yaml
from tico_ssl.results.record import Record
from tico_ssl.results.run_folder import open_run
from tico_ssl.results.study_state import study_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import read_json_lines


def read_record(folder: str | Path) -> Record:
    """Read a run. Files that are not there yet are as good as empty ones."""
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
    """Whether `tico study` has made this folder."""
    return study_file(Path(folder).expanduser()).is_file()


def read_records(folders: Sequence[str | Path]) -> list[Record]:
    """Runs, and the runs of studies in their order and with the times that these have measured; each once."""
    found: dict[Path, Record] = {}
    for folder in folders:
        path = Path(folder).expanduser()
        records = _runs_of(path) if is_study(path) else [read_record(path)]
        found |= {record.run.folder.resolve(): record for record in records}
    return list(found.values())


def failures(folder: str | Path) -> dict[str, str]:
    """Why runs of a study failed, by name."""
    return {name: reason for row in _rows(Path(folder).expanduser()).values() for name, reason in row["failed"].items()}


def _runs_of(study: Path) -> list[Record]:
    inside = sorted(file.parent for file in study.glob("*/recipe.yaml"))
    if not inside:
        raise UserError(f"{study}: no run of this study has begun")
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
    """The rows of a study's results.json, by the name of the variant."""
    return {row["run"]: row for row in _json(study / "results.json").get("rows", [])}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _warnings(log: Path) -> list[str]:
    """Lines of the log that warn, every one once, without their time."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = [re.sub(r"^\S+ \S+  ", "", line) for line in lines if "warning:" in line]
    return list(dict.fromkeys(found))
