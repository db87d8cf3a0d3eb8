"""Optional libraries: what each extra of the package is for, and the command that installs it."""

import json
import shlex
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

PACKAGE = "tico-ssl"


class Extra(NamedTuple):
    """The modules of an extra, and what it is for."""

    modules: tuple[str, ...]
    purpose: str

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.modules if not installed(name)]


EXTRAS = {
    "parquet": Extra(("pyarrow",), "images from .parquet files; features and predictions as .parquet"),
    "tiff": Extra(("tifffile",), "TIFFs of 16-bit colour, with several images, or cut into tiles"),
    "dicom": Extra(("pydicom",), "DICOM files"),
    "onnx": Extra(("onnx", "onnxscript", "onnxruntime"), "tico export RUN onnx"),
    "hub": Extra(("huggingface_hub",), "hf upload, which publishes what tico export RUN huggingface writes"),
    "lightning": Extra(("lightning",), "training by Lightning's Trainer"),
    "wandb": Extra(("wandb",), "training.loggers=[wandb]"),
    "mlflow": Extra(("mlflow",), "training.loggers=[mlflow]"),
    "cloud": Extra(("obstore",), "data in object storage: s3://, gs://, az://, https://"),
    "slurm": Extra(("submitit",), "tico pretrain and study --slurm"),
    "umap": Extra(("umap",), "maps of the report by UMAP instead of t-SNE"),
    "detection": Extra(("pycocotools",), "tico evaluate RUN detection or segmentation"),
}


def installed(module: str) -> bool:
    """Whether a library can be imported; a folder that happens to have its name is none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # of a module that was replaced, or put in place by hand
        return False
    return spec is not None and spec.origin is not None


def install_command(extra: str) -> str:
    """The command that installs an extra: from the clone or repository that this package was installed from, if it
    was, and else by the package's name."""
    origin = _origin()
    url = str(origin.get("url", ""))
    if (vcs := origin.get("vcs_info", {}).get("vcs")) is not None:
        return shlex.join(["pip", "install", f"{PACKAGE}[{extra}] @ {vcs}+{url}"])
    if (folder := origin.get("dir_info")) is None:
        return shlex.join(["pip", "install", f"{PACKAGE}[{extra}]"])
    clone = Path(unquote(urlsplit(url).path))
    with suppress(OSError):  # the current folder may be gone
        clone = Path() if clone.samefile(Path.cwd()) else clone
    return shlex.join(["pip", "install", *(["-e"] if folder.get("editable") else []), f"{clone}[{extra}]"])


def _origin() -> dict[str, Any]:
    """Where this package was installed from, as pip records it (PEP 610); nothing if from an index. A clone that was
    never installed is like an editable one."""
    with suppress(metadata.PackageNotFoundError, ValueError, OSError):
        recorded = json.loads(metadata.distribution(PACKAGE).read_text("direct_url.json") or "{}")
        return recorded if isinstance(recorded, dict) else {}
    clone = Path(__file__).resolve().parents[3]
    return {"url": clone.as_uri(), "dir_info": {"editable": True}} if (clone / "pyproject.toml").is_file() else {}
