"""What RUN may be, and the folder of its results. Nothing here imports torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tico_ssl.config.sections import BACKBONE_LIBRARIES, DataConfig
from tico_ssl.data.given import Given, as_source, places_in, require_data
from tico_ssl.data.remote.urls import is_url
from tico_ssl.results.run_folder import Run, backbone_file, open_run
from tico_ssl.runtime.errors import UserError

MODELS = Path("runs") / "models"  # models from other libraries
TRAINED, INITIAL, UNTRAINED, PIXELS = "trained", "initial", "untrained", "pixels"  # columns that every table may have


def is_model_name(run: str | Path) -> bool:
    """Whether this is library/model and not a path on disk."""
    return str(run).partition("/")[0] in BACKBONE_LIBRARIES and "/" in str(run) and not Path(run).expanduser().exists()


def home_of(run: str | Path) -> Path:
    """The run folder itself, or a folder beside a backbone file, named after it."""
    if is_model_name(run):
        return MODELS / f"{str(run).replace('/', '-')}-untrained"
    path = Path(run).expanduser()
    return path if path.is_dir() else path.with_suffix("")


def require_subject(run: str | Path, data: Given | None) -> None:
    """Require a run, a backbone file or a model name, and data that exist."""
    if is_model_name(run):
        _require_images(run, data)
    else:
        require_backbone(run, data)


def require_model(run: str | Path, data: Given | None, weights: str | Path | None) -> None:
    """The same where a model by name may come with a file of its weights."""
    if weights is not None and not is_model_name(run):
        raise UserError(f"--weights goes with the name of a model, such as torchvision/resnet50, not with {run}")
    if weights is not None and not Path(weights).expanduser().is_file():
        raise UserError(f"{weights}: no such file")
    require_subject(run, data)


def require_backbone(run: str | Path, data: Given | None) -> None:
    """Require a trained backbone, and data that exist."""
    backbone_file(run)
    if data is None and Path(run).expanduser().is_dir():
        _require_own_data(run)
    else:
        _require_images(run, data)


def data_of(run: Run) -> DataConfig:
    """The data of a run's recipe, as they are called in this working directory."""
    config, begun = run.recipe().data, run.begun_in()
    if begun is None or begun == Path.cwd():
        return config
    return config.model_copy(update={key: places_in(begun, getattr(config, key)) for key in ("source", "root")})


def _require_own_data(run: str | Path) -> None:
    source = data_of(open_run(run)).source
    for place in [source] if isinstance(source, str) else source:
        try:
            require_data(place)
        except UserError as error:
            if is_url(place) or Path(place).expanduser().exists():
                raise
            raise UserError(
                f"{run} was trained on '{place}', which is not here: say where it is with --data"
            ) from error


@dataclass(frozen=True)
class Other:
    """A model to compare with, as it was given: a run, a backbone file, or a model by name, with weights or without."""

    given: str
    model: str
    weights: str | None = None

    @classmethod
    def parse(cls, given: str | Path) -> "Other":
        """MODEL, or NAME=WEIGHTS; an equals sign in a path is part of the path."""
        name, equals, weights = str(given).partition("=")
        return cls(str(given), name, weights) if equals and is_model_name(name) else cls(str(given), str(given))

    def require(self) -> None:
        """Require that its weights exist."""
        if not is_model_name(self.model):
            backbone_file(self.model)
        elif self.weights is not None and not Path(self.weights).expanduser().is_file():
            raise UserError(f"{self.weights}: no such file")

    def names(self) -> list[str]:
        """Names for its column: a short one, and longer ones that tell it from others. They can be file names."""
        path = Path(self.model).expanduser().resolve()
        last = path.name if path.is_dir() else path.stem
        if is_model_name(self.model):
            names = [self.model.partition("/")[2], self.given]
        else:
            names = [last, f"{path.parent.name}/{last}", str(path)]
        return [re.sub(r"[^\w.+=-]+", "-", name).strip("-") for name in names]


def others_beside(run: str | Path, against: Sequence[str | Path]) -> dict[str, Other]:
    """The models to compare a run with, by column: the weights that it started from, if any, and those given."""
    initial = Run(Path(run).expanduser()).initial_file
    found = {INITIAL: Other.parse(initial)} if initial.is_file() else {}
    taken = {TRAINED, INITIAL, UNTRAINED, PIXELS, "difference"}
    for given in against:
        other = Other.parse(given)
        name = next((name for name in other.names() if name not in taken), None)
        if name is None or other in found.values():
            raise UserError(f"--against={given}: given twice")
        taken.add(name)
        found[name] = other
    return found


def _require_images(run: str | Path, data: Given | None) -> None:
    if data is None:
        raise UserError(f"{run}: say which images with --data")
    require_data(as_source(data))
