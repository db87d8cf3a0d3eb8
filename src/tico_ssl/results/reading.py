"""Reading run folders, in whatever state the run is. What is damaged is left out, and said."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tico_ssl.config.yaml_text import parse_yaml
from tico_ssl.results.record import Line, Record, is_number, is_result
from tico_ssl.results.run_folder import Run, open_run
from tico_ssl.results.study_state import last_round, study_file
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import parsed_lines
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

MOST_NAMES = 5  # in a sentence
TEXT_METRICS = ("fallback", "execution")  # the values of a line of metrics.jsonl that are not numbers


def read_record(folder: str | Path) -> Record:
    """Read a run. Missing files count as empty, and so does what is damaged in them; only the recipe is needed."""
    run = open_run(folder)
    files = [run.recipe_file, run.metrics_file, run.folder / "train.log", run.checkpoint_file]
    damage: list[str] = []
    images = _json(run.images_file, damage).get("images")
    return Record(
        run=run,
        recipe=_recipe(run.recipe_file),
        environment=_environment(run.folder / "environment.json", damage),
        metrics=_lines(run.metrics_file, _is_metrics, damage),
        spectrum=_lines(run.spectrum_file, _is_spectrum, damage),
        results=_lines(run.results_file, is_result, damage),
        bad_files=_lines(run.bad_files_file, lambda line: True, damage),
        warnings=_warnings(run.folder / "train.log"),
        checkpoint=run.checkpoint(),
        last_sign=max(file.stat().st_mtime for file in files if file.is_file()),
        damage=damage,
        found_images=images if isinstance(images, int) and is_number(images) else None,
    )


def _recipe(file: Path) -> dict[str, Any]:
    """The recipe as it was written, of any version; the numbers that tables are made of are checked."""
    try:
        recipe = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: damaged, not UTF-8 text ({error})") from error
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        raise UserError(f"{file}: damaged, not a recipe")
    for section, key in (("training", "epochs"), ("training", "batch_size"), ("data", "limit")):
        values = recipe.get(section) or {}
        if not isinstance(values, dict):
            raise UserError(f"{file}: damaged, {section} is not a section")
        if not (values.get(key) is None or is_number(values[key])):
            raise UserError(f"{file}: damaged, {section}.{key} is not a number of a possible size")
    return recipe


def _environment(file: Path, damage: list[str]) -> dict[str, Any]:
    found = _json(file, damage)
    return found if isinstance(found.get("packages"), dict) else found | {"packages": {}}


def _lines(file: Path, sound: Callable[[Line], bool], damage: list[str]) -> list[Line]:
    """The sound lines of a file; how many there are of the others is noted as damage."""
    lines = parsed_lines(file)
    good = [line for line in lines if line is not None and sound(line)]
    if lost := len(lines) - len(good):
        damage.append(f"{file.name} is damaged: {lost} of {counted(len(lines), 'line')} are left out")
    return good


def _is_metrics(line: Line) -> bool:
    """A step, and numbers."""
    return "step" in line and all(is_number(value) for key, value in line.items() if key not in TEXT_METRICS)


def _is_spectrum(line: Line) -> bool:
    """Shares of eigenvalues by rank, at an epoch."""
    ranks, shares = line.get("ranks"), line.get("shares")
    if not isinstance(ranks, list) or not isinstance(shares, list) or not 0 < len(ranks) == len(shares):
        return False
    return is_number(line.get("epoch")) and all(map(is_number, ranks + shares)) and min(ranks) > 0


def is_study(folder: str | Path) -> bool:
    """Whether this is the folder of a study."""
    path = Path(folder).expanduser()
    return study_file(path).is_file() or last_round(path) is not None


def runs_among(places: Sequence[str | Path]) -> list[str | Path]:
    """Those of several places that are runs or studies, as a pattern such as runs/* may give others too; what is passed
    over is said in one line. A single place, or one that does not exist, has to be a run."""
    if len(places) < 2:
        return list(places)
    passed = [str(place) for place in places if _is_something_else(Path(place).expanduser())]
    found = [place for place in places if str(place) not in passed]
    if not found:
        raise UserError(f"none of these is a run folder with a recipe.yaml: {some(passed)}")
    if passed:
        line = f"passed over, since not a run folder: {some(passed)}"
        print(printable(line), file=sys.stderr)  # the table may go to a file
    return found


def some(names: Sequence[str]) -> str:
    """The first few of these names, and how many more there are."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _is_something_else(place: Path) -> bool:
    """Whether this exists, and is neither a run nor a study of which a run has started."""
    a_run = any(_rows_in(place).glob("*/recipe.yaml")) if is_study(place) else Run(place).recipe_file.is_file()
    return place.exists() and not a_run


def read_records(folders: Sequence[str | Path]) -> list[Record]:
    """Runs and the runs of studies, each once; a study's runs in its order, with the times that it measured. Of a study
    with halving those of the last round."""
    found: dict[Path, Record] = {}
    for folder in folders:
        path = Path(folder).expanduser()
        records = _runs_of(_rows_in(path)) if is_study(path) else [read_record(path)]
        found |= {record.run.folder.resolve(): record for record in records}
    return list(found.values())


def failures(folder: str | Path) -> dict[str, str]:
    """Reasons of failed runs of a study, by name."""
    rows = _rows(_rows_in(Path(folder).expanduser())).values()
    return {name: str(reason) for row in rows for name, reason in row["failed"].items()}


def _rows_in(study: Path) -> Path:
    """The folder of the runs that a study is compared by: its own, or of its last round of halving."""
    return last_round(study) or study


def _runs_of(study: Path) -> list[Record]:
    inside = sorted(file.parent for file in study.glob("*/recipe.yaml"))
    if not inside:
        raise UserError(f"{study}: no run of this study has started")
    rows = _rows(study)
    order = list(rows)
    variants = {path: path.name.rpartition("-seed")[0] for path in inside}
    inside.sort(key=lambda path: order.index(variants[path]) if variants[path] in order else len(order))
    records = []
    for path in inside:
        try:
            records.append(_timed(read_record(path), rows.get(variants[path], {})))
        except UserError as error:  # one damaged run must not cost the table of the others
            say(f"left out {path.name}: {error}")
    if not records:
        raise UserError(f"{study}: no run of this study can be read")
    return records


def _timed(record: Record, row: dict[str, Any]) -> Record:
    seconds, speed = row.get("seconds"), row.get("images_per_second")
    if not record.finished or not (is_number(seconds) and is_number(speed)) or not (seconds and speed):
        return record
    return replace(record, timed=(float(seconds), float(speed)))


def _rows(study: Path) -> dict[str, dict[str, Any]]:
    """The sound rows of a study's results.json, by variant."""
    rows = _json(study / "results.json", []).get("rows")
    sound = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {row["run"]: row for row in sound if isinstance(row.get("run"), str) and isinstance(row.get("failed"), dict)}


def _json(path: Path, damage: list[str]) -> dict[str, Any]:
    """The JSON object in a file, empty if there is none; that it is damaged is noted."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # not JSON, not UTF-8
        found = None
    if not isinstance(found, dict):
        damage.append(f"{path.name} is damaged and left out")
        return {}
    return found


def _warnings(log: Path) -> list[str]:
    """Warnings in the log, without repetition and time stamps."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = [re.sub(r"^\S+ \S+  ", "", line) for line in lines if "warning:" in line]
    return list(dict.fromkeys(found))
