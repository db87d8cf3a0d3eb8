"""A run on disk: paths, and atomic reads and writes.

recipe.yaml (resolved), environment.json, metrics.jsonl, spectrum.jsonl (of TiCo's covariance), train.log, TensorBoard
events, wandb.json and mlflow.json (of these loggers), views.png, checkpoints/last.pt (training state),
checkpoints/backbone.safetensors (trained weights), checkpoints/initial.safetensors (weights that it started from, if
any), results.jsonl, lock (held while training)
"""

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from tico_ssl.config.few_images import as_adapted
from tico_ssl.config.recipe import Recipe, dump_recipe, load_recipe
from tico_ssl.config.sections import FOUND
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest, remove_temporaries, write_atomically
from tico_ssl.runtime.json_lines import read_json_lines
from tico_ssl.runtime.locks import LOCK
from tico_ssl.runtime.slurm import JOBS

MOST_SHOWN = 5  # differences of recipes in a message
MAY_CHANGE = (
    "description",
    "data.store",
    "training.least_steps",  # by which the run's batch and epochs were chosen
    "training.log_every",
    "training.loggers",
    "training.sharded",
    "training.workers",
    "training.keep_",
    "training.checkpoint_",
)
"""Settings that do not affect the weights, by the beginning of their names: a resumed run may have others, and so may
runs of one recipe in a table."""
LONGER = "training.epochs"  # may grow: a run is trained longer


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def environment_file(self) -> Path:
        return self.folder / "environment.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def spectrum_file(self) -> Path:
        return self.folder / "spectrum.jsonl"

    @property
    def results_file(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def quick_results_file(self) -> Path:
        """Results of a quick look, on some of the images: apart, so that they are never taken for whole ones."""
        return self.folder / "quick_results.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        return self.folder / "checkpoints" / "last.pt"

    @property
    def backbone_file(self) -> Path:
        return self.folder / "checkpoints" / "backbone.safetensors"

    @property
    def initial_file(self) -> Path:
        """The backbone that training started from, if that was not at random."""
        return self.folder / "checkpoints" / "initial.safetensors"

    @property
    def bad_files_file(self) -> Path:
        return self.folder / "bad_files.jsonl"

    @property
    def unread_file(self) -> Path:
        """Images that evaluations left out."""
        return self.folder / "results.bad_files.jsonl"

    @property
    def images_file(self) -> Path:
        """By what the images are recognised on resume."""
        return self.folder / "images.json"

    @property
    def views_file(self) -> Path:
        """Contact sheet of the first batch."""
        return self.folder / "views.png"

    def of_training(self) -> tuple[Path, ...]:
        """The files that training writes."""
        logs = (self.metrics_file, self.spectrum_file, self.bad_files_file, self.images_file, self.views_file)
        weights = (self.checkpoint_file, self.backbone_file, self.initial_file)
        return self.recipe_file, self.environment_file, *logs, *weights

    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load_recipe(self.recipe_file)

    def begun_in(self) -> Path | None:
        """The working directory in which training began, to which the recipe's paths are relative; None: unknown. The
        recipe keeps them as they were given, so that a folder with runs and images can be moved."""
        try:
            folder = json.loads(self.environment_file.read_bytes())["folder"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an older version, or damaged
            return None
        return Path(folder) if isinstance(folder, str) else None

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        return read_json_lines(self.metrics_file)

    def results(self) -> list[dict[str, Any]]:
        """Every result of an evaluation."""
        return read_json_lines(self.results_file)

    def checkpoint(self) -> str | None:
        """Digest of the current backbone; without its weights, that of the last evaluation."""
        if self.backbone_file.is_file():
            return digest(self.backbone_file)
        evaluated = [result["checkpoint"] for result in self.results() if "checkpoint" in result]
        return evaluated[-1] if evaluated else None


def open_run(folder: str | Path) -> Run:
    """An existing run."""
    run = Run(Path(folder).expanduser())
    if not run.recipe_file.is_file():
        raise UserError(f"{folder}: not a run folder (it has no recipe.yaml)")
    return run


def backbone_file(source: str | Path) -> Path:
    """Path of the backbone of a run folder, or the file itself."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = Run(path).backbone_file
    if not path.is_file():
        raise UserError(f"{source}: no trained backbone here ({path} does not exist)")
    return path


def admit(folder: Path, recipe: Recipe, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that must not be written to. A resumed run may get more epochs."""
    if not folder.is_dir() and any(place.is_file() for place in (folder, *folder.parents)):
        raise UserError(f"{folder} is a file, not a folder")
    if not folder.exists() or _barely_begun(Run(folder)):
        return
    run = Run(folder)
    if resume and run.recipe_file.is_file():
        if found := changed(run, recipe, longer=True):
            own = f"`tico pretrain {quote(str(run.recipe_file))} --out {quote(str(folder))} --resume`"
            raise UserError(f"{folder} cannot be resumed with another recipe: {found}; {own} goes on with its own")
    elif not run.recipe_file.is_file():
        raise UserError(f"{folder} exists and is not a run folder (it has no recipe.yaml): choose another --out")
    elif not overwrite:
        raise UserError(
            f"{folder} exists: continue it with --resume, replace it with --overwrite, or choose another --out"
        )


def as_begun(run: Run, recipe: Recipe) -> Recipe:
    """A recipe with what an existing run found in its images, where the recipe leaves it to them: the range of values,
    mean and standard deviation, and how long to train on few."""
    if not run.recipe_file.is_file():
        return recipe
    data, channels, begun = recipe.data, recipe.backbone.channels, run.recipe()
    known = {"range": begun.data.range} if data.range == FOUND else {}
    known |= {key: getattr(begun.data, key) for key in ("mean", "std") if len(getattr(data, key)) != channels}
    recipe = recipe.model_copy(update={"data": data.model_copy(update=known)})
    asked = recipe.training.least_steps
    return as_adapted(recipe, begun) if asked and asked == begun.training.least_steps else recipe


def _barely_begun(run: Run) -> bool:
    """Whether a folder is empty, or has nothing but what a start leaves that dies before it has written the recipe."""
    begun = {LOCK, JOBS, run.environment_file.name, run.checkpoint_file.parent.name}
    return all(
        path.name in begun or (path.suffix == ".tmp" and path.name.startswith((run.recipe_file.name, *begun)))
        for path in run.folder.iterdir()
    ) and not any(run.folder.glob("checkpoints/*"))


def create_run(folder: Path, recipe: Recipe, overwrite: bool) -> None:
    """Create the folder of a new run; that of a resumed one stays, without what a killed process was writing, and with
    its new number of epochs."""
    run = Run(folder)
    if overwrite and run.recipe_file.is_file():
        _clear(run)
    run.checkpoint_file.parent.mkdir(parents=True, exist_ok=True)
    for file in run.of_training():  # other files may be another command's, at work now
        remove_temporaries(file)
    if not run.recipe_file.is_file():
        write_atomically(run.environment_file, json.dumps(environment() | {"folder": str(Path.cwd())}, indent=2) + "\n")
        write_atomically(run.recipe_file, dump_recipe(recipe))  # last: it makes this a run
    elif (old := run.recipe()).training.epochs < recipe.training.epochs:
        training = old.training.model_copy(update={"epochs": recipe.training.epochs})
        write_atomically(run.recipe_file, dump_recipe(old.model_copy(update={"training": training})))


def _clear(run: Run) -> None:
    """Remove a run. The checkpoints go first and the recipe last: whatever is left of it is a run that can be resumed,
    from its beginning, or replaced."""
    shutil.rmtree(run.checkpoint_file.parent, ignore_errors=True)
    for path in run.folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (LOCK, run.recipe_file.name):
            path.unlink()
    run.recipe_file.unlink()


def changed(run: Run, recipe: Recipe, longer: bool) -> str:
    """What affects the weights and is not as in the recipe of an existing run, in words; nothing if a resume would be
    bitwise-identical. With `longer`, the number of epochs may have grown."""
    before, after = (flattened(one.model_dump(mode="json")) for one in (run.recipe(), as_begun(run, recipe)))
    may_change = [key for key in before.keys() | after.keys() if key.startswith(MAY_CHANGE)]
    if longer and before[LONGER] < after[LONGER]:
        may_change.append(LONGER)
    for key in may_change:
        before.pop(key, None)
        after.pop(key, None)
    return differences(before, after)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first few settings that differ, by path, and how many more do, in words."""
    found = [
        f"{key} was {before.get(key)}, is {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if _unnumbered(before.get(key)) != _unnumbered(after.get(key))
    ]
    more = f" (and {len(found) - MOST_SHOWN} more)" if len(found) > MOST_SHOWN else ""
    return "; ".join(found[:MOST_SHOWN]) + more


def _unnumbered(value: Any) -> Any:
    """Python data sets of the same class are numbered within a program; across programs the numbers mean nothing."""
    return re.sub(r"^(python:.+)-\d+$", r"\1", value) if isinstance(value, str) else value


def flattened(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as a flat mapping by path, such as training.epochs or views.0.blur."""
    if isinstance(values, dict) and values:
        return {k: v for key, value in values.items() for k, v in flattened(value, f"{path}.{key}".lstrip(".")).items()}
    if isinstance(values, list) and values:
        return {k: v for i, value in enumerate(values) for k, v in flattened(value, f"{path}.{i}").items()}
    return {path: values}


def environment() -> dict[str, Any]:
    """The environment of a run: command, machine, package versions."""
    packages = ("tico-ssl", "torch", "torchvision", "timm", "numpy", "pillow", "scikit-learn")
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]).replace("__main__.py", "python -m tico_ssl"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "packages": {name: installed_version(name) for name in packages},
    }


def _gpu() -> str | None:
    """Name of the GPU; None where torch has not been imported, as in a process that only reads and writes."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
