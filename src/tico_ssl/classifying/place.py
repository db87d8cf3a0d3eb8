"""Where a classifier is. Nothing here imports torch."""

from pathlib import Path

from tico_ssl.features.homes import home_of
from tico_ssl.runtime.errors import UserError

FILE = "classifier.safetensors"
FOLDER = "classifier"  # in that of a run


def folder_for(run: str | Path, out: str | Path | None, overwrite: bool) -> Path:
    """The folder of a new classifier: by default in that of the run, or beside a backbone file."""
    folder = home_of(run) / FOLDER if out is None else Path(out).expanduser()
    if any(place.is_file() for place in (folder, *folder.parents)):
        raise UserError(f"{folder} is a file, or in one: --out takes a folder")
    if (folder / FILE).exists() and not overwrite:
        raise UserError(f"{folder} has a classifier: replace it with --overwrite, or choose another --out")
    return folder


def is_classifier(place: str | Path) -> bool:
    """Whether this is the folder or the file of a classifier, rather than a run or a backbone."""
    path = Path(place).expanduser()
    return (path / FILE).is_file() or (path.is_file() and path.name == FILE)


def classifier_file(model: str | Path) -> Path:
    """The classifier of a folder that `tico finetune` has written, or of a run, or the file itself."""
    path = Path(model).expanduser()
    file = path / FILE if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (path / FOLDER / FILE).is_file():
        return path / FOLDER / FILE
    if not file.is_file():
        raise UserError(f"{model}: no classifier here ({file} does not exist); `tico finetune` makes one")
    return file
