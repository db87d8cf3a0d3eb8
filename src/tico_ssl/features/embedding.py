"""The features of images as a table: .npz, .csv or .parquet. User errors are raised before torch is imported."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tico_ssl.data.given import Given
from tico_ssl.features.homes import require_backbone
from tico_ssl.results.formats import safe_cell
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import written_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray


def embed(run: str | Path, data: Given | None = None, out: str | Path = "features.npz", bf16: bool = False) -> Path:
    """Write features, names and labels (if any) of all images of a source as .npz, .csv or .parquet. With `bf16`,
    features are computed in bf16."""
    out = Path(out).expanduser()
    if out.suffix not in WRITERS:
        raise UserError(f"{out}: features are written as {', '.join(sorted(WRITERS))}")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(f"{out}: parquet needs pyarrow: pip install 'tico-ssl[parquet]'")
    require_backbone(run, data)

    import torch

    from tico_ssl.data.sources import required
    from tico_ssl.data.store import open_stored
    from tico_ssl.features.extraction import extract, needed_side
    from tico_ssl.features.subjects import data_config
    from tico_ssl.networks.storage import load_backbone
    from tico_ssl.runtime.device import choose_device, tune_process
    from tico_ssl.runtime.printing import printable

    device = choose_device()
    tune_process(device)
    backbone = load_backbone(run)
    config = data_config(run, data, backbone)
    channels, shorter = backbone.config.channels, needed_side(backbone)
    source = required(open_stored(config, "train", channels, shorter, fill=False), config)
    dtype = torch.bfloat16 if bf16 else torch.float32
    features, places = extract(backbone, source, device, label="embedding", dtype=dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    labels = None if source.labels is None else source.labels[places].numpy()
    names = [printable(source.names(i)) for i in places.tolist()]
    with written_atomically(out) as temporary:
        WRITERS[out.suffix](temporary, Table(names, labels, source.classes, features.numpy()))
    return out


class Table(NamedTuple):
    """One row per image. Labels are one class per image (N), several (N, classes), or absent."""

    names: list[str]
    labels: "NDArray[Any] | None"
    classes: tuple[str, ...]
    features: "NDArray[Any]"

    def columns(self) -> dict[str, Any]:
        """Columns by name, each a list or an array."""
        columns: dict[str, Any] = {"filename": self.names}
        if self.labels is not None and self.labels.ndim == 1:
            columns["label"] = self.labels
        elif self.labels is not None:
            classes = self.classes or range(self.labels.shape[1])
            columns |= {f"label_{name}": values for name, values in zip(classes, self.labels.T, strict=True)}
        return columns | {f"feature_{i}": values for i, values in enumerate(self.features.T)}


def _write_npz(out: Path, table: Table) -> None:
    import numpy as np

    arrays: dict[str, Any] = {"names": np.array(table.names), "features": table.features}
    with out.open("wb") as file:  # given a path, NumPy would add a suffix
        np.savez_compressed(file, **arrays if table.labels is None else arrays | {"labels": table.labels})


def _write_csv(out: Path, table: Table) -> None:
    import csv

    columns = table.columns()
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(safe_cell, columns))
        columns["filename"] = map(safe_cell, table.names)
        writer.writerows(zip(*columns.values()))


def _write_parquet(out: Path, table: Table) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(table.columns()), out)


WRITERS = {".npz": _write_npz, ".csv": _write_csv, ".parquet": _write_parquet}
