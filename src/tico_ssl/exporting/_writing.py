"""Export a backbone, with a snippet that loads the file. User errors are raised before torch is imported."""

from pathlib import Path

from tico_ssl.config import catalogue
from tico_ssl.results.run_folder import backbone_file


def export(run: str | Path, format: str, out: str | Path) -> Path:
    """Write the backbone of a run for another library, weight standardisation folded into the weights."""
    export_with_snippet(run, format, out)
    return Path(out)


def export_with_snippet(run: str | Path, format: str, out: str | Path) -> str:
    """The same, returning a snippet that loads the file."""
    catalogue.require("exporting", format)
    backbone_file(run)

    from tico_ssl.networks.storage import load_backbone

    module = catalogue.load("exporting", format)
    path = Path(out).expanduser()
    backbone = load_backbone(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    snippet: str = module.write(backbone, path)
    return snippet
