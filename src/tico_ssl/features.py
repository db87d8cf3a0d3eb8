"""Features of frozen backbones: extracted once, used by every protocol that needs no gradient."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.bad_files import attempts
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.names import printable
from tico_ssl.data.source import Source
from tico_ssl.data.sources import DataConfig, Given, as_source, open_training
from tico_ssl.device import choose_device
from tico_ssl.errors import UserError
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import load_backbone
from tico_ssl.progress import track
from tico_ssl.run_folder import open_run
from tico_ssl.views import operations
from tico_ssl.views.centre import KEPT
from tico_ssl.views.executor import sizes_of

BATCH = 256
WORKERS = 4  # threads that decode files


class Extracted(NamedTuple):
    """Features (images, width) on the CPU, and the places in the source that they belong to: bad files are left out."""

    features: Tensor
    places: Tensor


def raw_batches(source: Source) -> Iterator[tuple[Tensor | list[Tensor], list[int]]]:
    """Batches of uint8 images and their places, in order; images that cannot be read are left out."""
    if source.images is not None:
        for places in torch.arange(len(source)).split(BATCH):
            yield source.take(places), places.tolist()
        return
    results = enumerate(attempts(source, range(len(source)), WORKERS))
    while chunk := list(islice(results, BATCH)):
        good = [(place, image) for place, image in chunk if not isinstance(image, BadImage)]
        if good:
            yield [image for _, image in good], [place for place, _ in good]


def image_batches(
    source: Source, backbone: Backbone, device: torch.device, whole: bool = False
) -> Iterator[tuple[Tensor, list[int]]]:
    """The same, preprocessed for a backbone."""
    dtype = next(backbone.parameters()).dtype
    preprocess = partial(squashed, backbone) if whole else backbone.preprocess
    for images, places in raw_batches(source):
        moved = images.to(device) if isinstance(images, Tensor) else images
        yield preprocess(moved).to(device, dtype), places


def squashed(backbone: Backbone, images: Tensor | Sequence[Tensor]) -> Tensor:
    """Whole images, pressed into the square that the network takes: where objects at the edge count."""
    heights, widths = sizes_of(images).to(images[0].device).unbind(dim=1)
    zeros = torch.zeros_like(heights)
    pressed = operations.resized_crop(images, zeros, zeros, heights, widths, zeros, backbone.image_size)
    return operations.normalise(pressed, backbone.mean, backbone.std)


def needed_side(backbone: Backbone) -> int:
    """Pixels that an image needs along its shorter side, so that its central square has as many as the network sees."""
    return math.ceil(backbone.image_size / KEPT)


@torch.no_grad()
def extract(
    backbone: Backbone, source: Source, device: torch.device, label: str | None = None, whole: bool = False
) -> Extracted:
    """What a backbone, in evaluation mode, makes of every image's centre, or of the whole. It is left as it was."""
    training = backbone.training
    backbone.eval().to(device)
    features, places = [], []
    for images, at in track(image_batches(source, backbone, device, whole), -(-len(source) // BATCH), label):
        features.append(backbone(images).cpu())  # in float32: a measurement should not depend on the hardware's bf16
        places += at
    backbone.train(training)
    if not features:
        raise UserError(f"{source.name}: not one of the {len(source)} images can be read")
    found = Extracted(torch.cat(features), torch.tensor(places))
    if bad := int((~found.features.isfinite().all(dim=1)).sum()):
        raise UserError(
            f"{backbone.config.name} makes numbers that are not finite of {bad} of {len(places)} images: "
            "its weights are damaged, or its training has diverged"
        )
    return found


def pixels(source: Source) -> Tensor:
    """Raw pixels of a source of small images, as features: the humblest baseline."""
    if source.images is None:
        raise ValueError("raw pixels need images of one size")
    return source.take(torch.arange(len(source))).flatten(1).float() / 255


def embed(run: str | Path, data: Given | None = None, out: str | Path = "features.npz") -> Path:
    """Features of all images of a source with their names (and labels), as .npz, .csv or .parquet."""
    out = Path(out).expanduser()
    if out.suffix not in WRITERS:
        raise UserError(f"{out}: features are written as {', '.join(sorted(WRITERS))}")
    backbone = load_backbone(run)
    config = data_config(run, data)
    source = open_training(config, backbone.config.channels, needed_side(backbone))
    features, places = extract(backbone, source, choose_device(), label="embedding")
    out.parent.mkdir(parents=True, exist_ok=True)
    labels = None if source.labels is None else source.labels[places].numpy()
    names = [printable(source.names(i)) for i in places.tolist()]
    WRITERS[out.suffix](out, Table(names, labels, source.classes, features.numpy()))
    return out


def data_config(run: str | Path, data: Given | None) -> DataConfig:
    """The data of a run, or other images in the run's size."""
    if Path(run).expanduser().is_dir():
        config = open_run(run).recipe().data
        return config if data is None else config.model_copy(update={"source": as_source(data), "limit": None})
    backbone = load_backbone(run)
    if data is None:
        raise UserError(f"{run}: say which images with --data")
    return DataConfig(source=as_source(data), image_size=backbone.image_size, mean=backbone.mean, std=backbone.std)


class Table(NamedTuple):
    """What is written: one row an image. Labels are one an image (N), several (N, classes), or absent."""

    names: list[str]
    labels: np.ndarray | None
    classes: tuple[str, ...]
    features: np.ndarray

    def columns(self) -> dict[str, Any]:
        """By name, each a list or an array."""
        columns: dict[str, Any] = {"filename": self.names}
        if self.labels is not None and self.labels.ndim == 1:
            columns["label"] = self.labels
        elif self.labels is not None:
            classes = self.classes or range(self.labels.shape[1])
            columns |= {f"label_{name}": values for name, values in zip(classes, self.labels.T, strict=True)}
        return columns | {f"feature_{i}": values for i, values in enumerate(self.features.T)}


def _write_npz(out: Path, table: Table) -> None:
    arrays: dict[str, Any] = {"names": np.array(table.names), "features": table.features}
    np.savez_compressed(out, **arrays if table.labels is None else arrays | {"labels": table.labels})


def _write_csv(out: Path, table: Table) -> None:
    import csv

    columns = table.columns()
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))


def _write_parquet(out: Path, table: Table) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{out}: parquet needs pyarrow: pip install 'tico-ssl[parquet]'") from error
    pyarrow.parquet.write_table(pyarrow.table(table.columns()), out)


WRITERS = {".npz": _write_npz, ".csv": _write_csv, ".parquet": _write_parquet}
