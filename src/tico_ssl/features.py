"""Features of frozen backbones: extracted once, used by every protocol that needs no gradient."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.sources import DataConfig, Source, open_source
from tico_ssl.device import choose_device
from tico_ssl.errors import UserError
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import load_backbone
from tico_ssl.progress import track
from tico_ssl.run_folder import open_run

BATCH = 256


def image_batches(
    source: Source, backbone: Backbone, device: torch.device, limit: int | None = None
) -> Iterator[Tensor]:
    """Preprocessed batches of a source, in order."""
    count = min(len(source), limit or len(source))
    dtype = next(backbone.parameters()).dtype
    for start in range(0, count, BATCH):
        places = range(start, min(start + BATCH, count))
        if source.images is not None:
            images: Tensor | list[Tensor] = source.images[places.start : places.stop].to(device)
        else:
            images = [source.fetch(place) for place in places]
        yield backbone.preprocess(images).to(device, dtype)


@torch.no_grad()
def extract(
    backbone: Backbone, source: Source, device: torch.device, limit: int | None = None, label: str | None = None
) -> Tensor:
    """Features (images, width) on the CPU. The backbone works in evaluation mode and is left as it was."""
    training = backbone.training
    backbone.eval().to(device)
    total = -(-min(len(source), limit or len(source)) // BATCH)
    features = []
    for images in track(image_batches(source, backbone, device, limit), total, label):
        features.append(backbone(images).cpu())  # in float32: what is measured should not depend on the hardware's bf16
    backbone.train(training)
    return torch.cat(features)


def pixels(source: Source) -> Tensor:
    """Raw pixels of a source of small images, as features: the humblest baseline."""
    if source.images is None:
        raise ValueError("raw pixels need images of one size")
    return source.images.flatten(1).float() / 255


def embed(run: str | Path, data: str | None = None, out: str | Path = "features.npz") -> Path:
    """Features of all images of a source with their names (and labels), as .npz, .csv or .parquet."""
    out = Path(out).expanduser()
    if out.suffix not in WRITERS:
        raise UserError(f"{out}: features are written as {', '.join(sorted(WRITERS))}")
    backbone = load_backbone(run)
    config = data_config(run, data)
    source = open_source(config, "train", backbone.config.channels)
    assert source is not None  # only a test split can be absent
    features = extract(backbone, source, choose_device(), label="embedding").numpy()
    out.parent.mkdir(parents=True, exist_ok=True)
    labels = None if source.labels is None else source.labels.numpy()
    WRITERS[out.suffix](out, [source.names(i) for i in range(len(source))], labels, features)
    return out


def data_config(run: str | Path, data: str | None) -> DataConfig:
    """The data of a run, or other images in the run's size."""
    if Path(run).expanduser().is_dir():
        config = open_run(run).recipe().data
        return config if data is None else config.model_copy(update={"source": data, "limit": None})
    backbone = load_backbone(run)
    if data is None:
        raise UserError(f"{run}: say which images with --data")
    return DataConfig(source=data, image_size=backbone.image_size, mean=backbone.mean, std=backbone.std)


def _write_npz(out: Path, names: list[str], labels: Any, features: np.ndarray) -> None:
    arrays = {"names": np.array(names), "features": features}
    np.savez_compressed(out, **arrays if labels is None else arrays | {"labels": labels})


def _columns(names: list[str], labels: Any, features: np.ndarray) -> dict[str, Any]:
    columns: dict[str, Any] = {"filename": names}
    if labels is not None:
        columns["label"] = labels
    return columns | {f"feature_{i}": features[:, i] for i in range(features.shape[1])}


def _write_csv(out: Path, names: list[str], labels: Any, features: np.ndarray) -> None:
    import csv

    columns = _columns(names, labels, features)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))


def _write_parquet(out: Path, names: list[str], labels: Any, features: np.ndarray) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{out}: parquet needs pyarrow: pip install 'tico-ssl[parquet]'") from error
    pyarrow.parquet.write_table(pyarrow.table(_columns(names, labels, features)), out)


WRITERS = {".npz": _write_npz, ".csv": _write_csv, ".parquet": _write_parquet}
