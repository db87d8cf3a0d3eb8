"""Export a backbone, with a snippet that loads the file. User errors are raised before torch is imported."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from tico_ssl.classifying.place import is_classifier
from tico_ssl.config import catalogue
from tico_ssl.results.run_folder import Run, backbone_file
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.extras import install_command, installed

if TYPE_CHECKING:
    from tico_ssl.networks.backbones import Backbone

Network = Literal["online", "target"]
Preprocessing = Literal["outside", "inside", "inside-float"]


class Origin(NamedTuple):
    """Where exported weights come from: a run folder or a backbone file, and which of a run's networks."""

    place: Path
    network: str


def export(
    run: str | Path,
    format: str,
    out: str | Path,
    network: Network = "online",
    preprocessing: Preprocessing = "outside",
) -> Path:
    """Write the backbone of a run, or a classifier, for another library, weight standardisation folded in, and return
    the path `out`.

    `format` is one of `tico list exporting`, or the dotted path of your own. `network` is online, the trained network,
    or target, its moving average. With `preprocessing` inside, the file takes uint8 pixels and normalises them itself;
    with inside-float, values from 0 to 1.

        export("runs/mine", "onnx", "backbone.onnx", preprocessing="inside")
    """
    export_with_snippet(run, format, out, network, preprocessing)
    return _path(format, out)


def export_with_snippet(
    run: str | Path,
    format: str,
    out: str | Path | None = None,
    network: str = "online",
    preprocessing: str = "outside",
) -> str:
    """The same, returning a snippet that loads the file. By default it has the format's usual name."""
    catalogue.require("exporting", format)
    _require_one_of("network", network, get_args(Network))
    _require_one_of("preprocessing", preprocessing, get_args(Preprocessing))
    if is_classifier(run):
        _require_graph(run, format, network)
    else:
        backbone_file(run)
    path = _path(format, out)
    options = _options(format, Origin(Path(run).expanduser(), network), preprocessing)
    if network == "target":
        _require_checkpoint(Path(run).expanduser())
    _require_installed(format)

    module = catalogue.load("exporting", format)
    backbone = _load(run, network)
    path.parent.mkdir(parents=True, exist_ok=True)
    snippet: str = module.write(backbone, path, **options)
    return snippet


def usual_name(format: str) -> str:
    """Name of a format's file, if the user gives none."""
    return str(catalogue.declaration("exporting", format, "OUT", "backbone.pth"))


def _path(format: str, out: str | Path | None) -> Path:
    """What is written: a file, unless the format's usual name is that of a folder."""
    usual = usual_name(format)
    path = Path(usual if out is None else out).expanduser()
    if path.is_dir() and Path(usual).suffix:
        raise UserError(f"'{out}' is a folder: --out takes a file, such as {path / usual}")
    return path


def _require_one_of(option: str, given: str, valid: tuple[str, ...]) -> None:
    if given not in valid:
        raise UserError(f"{option} '{given}' is not known{suggestion(given, valid)}")


def _options(format: str, origin: Origin, preprocessing: str) -> dict[str, Any]:
    """Those that the format takes."""
    taken = catalogue.declaration("exporting", format, "OPTIONS", ())
    if preprocessing != "outside" and "preprocessing" not in taken:
        raise UserError(
            f"format '{format}' holds weights only, so preprocessing stays outside; onnx and torch-export can take it"
        )
    return {name: value for name, value in (("origin", origin), ("preprocessing", preprocessing)) if name in taken}


def _require_graph(place: str | Path, format: str, network: str) -> None:
    """A classifier has a head, for which formats of weights have no place, and no target."""
    if "preprocessing" not in catalogue.declaration("exporting", format, "OPTIONS", ()):
        raise UserError(f"{place} is a classifier, which goes to onnx or torch-export; {format} takes backbones")
    if network == "target":
        raise UserError(f"{place}: a classifier has no target network")


def _require_checkpoint(run: Path) -> None:
    if not run.is_dir():
        raise UserError(
            f"{run}: this file has the online network only; the target is in the checkpoint of a run folder"
        )
    if not Run(run).checkpoint_file.is_file():
        raise UserError(f"{run}: the target is in the run's checkpoint, and {Run(run).checkpoint_file} does not exist")


def _require_installed(format: str) -> None:
    missing = [name for name in catalogue.declaration("exporting", format, "NEEDS", ()) if not installed(name)]
    if missing:
        raise UserError(f"format '{format}' needs {' and '.join(missing)}: {install_command(format)}")


def _load(run: str | Path, network: str) -> "Backbone":
    if is_classifier(run):
        from tico_ssl.exporting._classifier import load_with_head

        return load_with_head(Path(run))
    if network == "target":
        from tico_ssl.exporting._target import load_target

        return load_target(Path(run).expanduser())
    from tico_ssl.networks.storage import load_backbone

    return load_backbone(run)
