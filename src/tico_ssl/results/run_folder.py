"""A run on disk: paths, and atomic reads and writes.

recipe.yaml (resolved), environment.json, metrics.jsonl, spectrum.jsonl (of TiCo's covariance), train.log, TensorBoard
events, views.png, checkpoints/last.pt (training state), checkpoints/backbone.safetensors (trained weights),
results.jsonl
"""

import json
import os
import platform
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tico_ssl.config.recipe import Recipe, dump_recipe, load_recipe
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest, write_atomically
from tico_ssl.runtime.json_lines import read_json_lines


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

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
    def checkpoint_file(self) -> Path:
        return self.folder / "checkpoints" / "last.pt"

    @property
    def backbone_file(self) -> Path:
        return self.folder / "checkpoints" / "backbone.safetensors"

    @property
    def bad_files_file(self) -> Path:
        return self.folder / "bad_files.jsonl"

    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load_recipe(self.recipe_file)

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
    """Refuse a folder that must not be written to."""
    if not folder.is_dir() and any(place.is_file() for place in (folder, *folder.parents)):
        raise UserError(f"{folder} is a file, not a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    run = Run(folder)
    if resume and run.recipe_file.is_file():
        _require_same(run.recipe(), recipe, folder)
    elif not overwrite:
        raise UserError(
            f"{folder} exists: continue it with --resume, replace it with --overwrite, or choose another --out"
        )
    elif not run.recipe_file.is_file():
        raise UserError(f"{folder} is not a run folder (it has no recipe.yaml), so --overwrite leaves it alone")


def create_run(folder: Path, recipe: Recipe, overwrite: bool) -> None:
    """Create the folder of a new run; a resumed one is left unchanged."""
    run = Run(folder)
    if overwrite and run.recipe_file.is_file():
        shutil.rmtree(folder)
    if run.recipe_file.is_file():
        return
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    write_atomically(run.recipe_file, dump_recipe(recipe))


def _require_same(old: Recipe, new: Recipe, folder: Path) -> None:
    """A bitwise-identical resume needs the same recipe."""
    before, after = flattened(old.model_dump(mode="json")), flattened(new.model_dump(mode="json"))
    keys = before.keys() | after.keys()
    changed = sorted(key for key in keys if _unnumbered(before.get(key)) != _unnumbered(after.get(key)))
    changed = [key for key in changed if not key.startswith(("description", "training.log_every", "training.workers"))]
    if changed:
        key = changed[0]
        raise UserError(
            f"{folder} cannot be resumed with another recipe: {key} was {before.get(key)}, is {after.get(key)}"
            + (f" (and {len(changed) - 1} more)" if len(changed) > 1 else "")
        )


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
        "packages": {name: _version(name) for name in packages},
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
