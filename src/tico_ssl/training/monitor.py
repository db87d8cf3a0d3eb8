"""Metrics, progress and collapse warnings during pretraining."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.methods._base import Method, StepOutput
from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.progress import say
from tico_ssl.training.checkpoint import Position
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.events import Events
from tico_ssl.training.journal import Journal, mean_values
from tico_ssl.training.logger import Ending, Logger
from tico_ssl.training.trackers import MlflowTracker, WandbTracker

RANK_IMAGES = 256  # of the global batch, for RankMe and uniformity at log steps: some milliseconds
FEWEST_DIMENSIONS = 10  # with fewer, a rank says nothing about collapse
LOGGERS: dict[str, type[Logger]] = {"tensorboard": Events, "wandb": WandbTracker, "mlflow": MlflowTracker}
SPECTRUM_RANKS = 128  # eigenvalues kept per epoch: the first ones, then ever sparser


class Monitor:
    """Writes metrics.jsonl and train.log, hands numbers to loggers, and shows progress; in the main process only."""

    def __init__(
        self, run: Run, steps: int, batch_size: int, begin: Position, loggers: Sequence[str] = ("tensorboard",)
    ) -> None:
        self.run, self.batch_size = run, batch_size
        self.clock, self.display = Clock(*begin), Display("pretraining", steps, begin.step)
        self.metrics, self.spectra = (Journal(file, begin.step) for file in (run.metrics_file, run.spectrum_file))
        self._warned: set[str] = set()
        self._latest: dict[str, Any] = {}
        self._bad_files = 0
        wanted = dict.fromkeys(loggers) if distributed.is_main() else ()  # each once
        self.loggers = [LOGGERS[name](run, begin.step, self.note) for name in wanted]

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        ending: Ending = "finished" if kind is None else "stopped" if stopped else "failed"
        for logger in self.loggers:
            logger.close(ending)

    def note(self, text: str) -> None:
        """A line on the console and in train.log."""
        note(self.run.folder, text)

    def log(
        self, step: int, epoch: float, values: dict[str, float], method: Method, after_warmup: bool, waited: float
    ) -> None:
        """Record and show the values of a log step. `waited`: seconds spent waiting for images."""
        steps, spent = self.clock.lap(step)
        clock = {
            "images_per_second": steps * self.batch_size / spent,
            "data_wait": waited / spent,
            "seconds": self.clock.seconds,
        }
        self._latest = {}
        self.write({"step": step, "epoch": round(epoch, 4), **values, **clock})
        if distributed.is_main() and float(epoch).is_integer() and (found := spectrum(method)) is not None:
            self.spectra.write({"step": step, "epoch": round(epoch), **found})
        if after_warmup:
            self._warn_of_collapse(values, method)
        self.display.status(_status(self._latest))

    def write(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, and its numbers to the loggers."""
        self._latest = self._latest | record
        self.metrics.write(record)
        for logger in self.loggers:
            logger.add(record)

    def flush(self) -> None:
        """Wait until all metrics are on the disk; an OSError if they cannot be written."""
        for journal in (self.metrics, self.spectra):
            journal.flush()

    @contextmanager
    def recording(self, what: str) -> Iterator[None]:
        """Training does not stop for something that cannot be written beside it; there is a warning, once."""
        try:
            yield
        except OSError as error:
            if what not in self._warned:
                self._warned.add(what)
                self.note(f"warning: {what} cannot be written: {refusal(error)}")

    def tell(self, step: int, epoch: float, reasons: dict[str, str], execution: str) -> None:
        """Warn about a fallback, and say how steps are executed instead."""
        self.metrics.write({"step": step, "epoch": round(epoch, 4), "fallback": reasons, "execution": execution})
        for what, reason in reasons.items():
            self.note(f"warning: {fallbacks.sentence(what, reason)}; steps are {execution}")

    def show(self, name: str, picture: Path) -> None:
        """Hand an image to the loggers."""
        for logger in self.loggers:
            logger.show(name, picture)

    def epoch_ended(self, step: int, epoch: int, epochs: int, bad_files: int = 0) -> None:
        """One line in the log; on a console without a bar, only some of them."""
        text = f"epoch {epoch}/{epochs}  {_status(self._latest)}"
        if bad_files > self._bad_files:  # once, not in every epoch
            self._bad_files = bad_files
            files = "file" if bad_files == 1 else "files"
            self.note(f"{bad_files:,} bad {files} left out so far, listed in {self.run.bad_files_file}")
        note(self.run.folder, text, silent=not self.display.line_due(step))

    def _warn_of_collapse(self, values: dict[str, float], method: Method) -> None:
        for name, text in collapse_signs(values, method.collapsed_loss()).items():
            if name not in self._warned:
                self._warned.add(name)
                self.note(f"warning: this looks like collapse: {text}")


def note(folder: Path, text: str, silent: bool = False) -> None:
    """A line in train.log, if it can be written, and on the console unless silent. Main process only."""
    if not distributed.is_main():
        return
    with suppress(OSError), (folder / "train.log").open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
    if not silent:
        say(text)


def measure(output: StepOutput, method: Method, extra: Mapping[str, float | Tensor]) -> dict[str, float]:
    """The values of a log step over the global batch. The only place in the loop that synchronises with the device."""
    values, embedding = mean_values(output), output.embedding
    if embedding is not None:
        values |= {name: float(value) for name, value in (spread(embedding) | occupied(embedding)).items()}
    return values | {name: float(value) for name, value in {**method.diagnostics(), **extra}.items()}


def spread(embedding: Tensor) -> dict[str, Tensor]:
    """Spread of different images on the sphere: standard deviation per dimension, and mean cosine similarity."""
    z = F.normalize(embedding.float(), dim=1)
    mean, square = distributed.all_mean(torch.stack([z.mean(0), z.square().mean(0)]))
    n = len(z) * distributed.world_size()
    return {
        "embedding_std": (square - mean.square()).clamp_min(0).sqrt().mean(),
        "mean_cosine": (n * mean.square().sum() - 1) / (n - 1),
    }


@torch.no_grad()
def spectrum(method: Method) -> dict[str, list[float]] | None:
    """Eigenvalues of the method's covariance as shares of their sum, in descending order, with their ranks; None if the
    method keeps no covariance. Called at a log step, which synchronises with the device anyway."""
    covariance = method.covariance()
    if covariance is None:
        return None
    values = torch.linalg.eigvalsh(covariance.double()).flip(0).clamp_min(0)
    shares = (values / values.sum().clamp_min(1e-300)).tolist()
    ranks = np.unique(np.geomspace(1, len(shares), SPECTRUM_RANKS).round().astype(int)).tolist()
    return {"ranks": ranks, "shares": [float(f"{shares[rank - 1]:.4g}") for rank in ranks]}


def occupied(embedding: Tensor) -> dict[str, Tensor]:
    """How much of the sphere embeddings occupy: RankMe, and uniformity (Wang and Isola, t = 2).

    Of the first images of the global batch, from their cosine similarities. In float64: in float32, rounding alone
    would turn a collapsed embedding into three dimensions.
    """
    share = max(1, RANK_IMAGES // distributed.world_size())
    z = F.normalize(distributed.gathered(embedding[:share].double()), dim=1)
    n = len(z)
    if min(z.shape) < FEWEST_DIMENSIONS:
        return {}
    cosines = z @ z.T
    singular = torch.linalg.eigvalsh(cosines)[-min(z.shape) :].clamp_min(0).sqrt()  # the rank is at most min(n, d)
    shares = singular / singular.sum() + 1e-7
    near = torch.exp(4 * (cosines - 1).clamp_max(0)).sum() - n  # without the n pairs of an image with itself
    return {
        "embedding_rank": torch.exp(-(shares * shares.log()).sum()),
        "embedding_uniformity": torch.log(near.clamp_min(1e-300) / (n * (n - 1))),
    }


def _status(record: dict[str, float]) -> str:
    if not record:
        return ""
    parts = [f"loss {record['loss']:.3f}"]
    parts += [f"{name} {record[name]:.3f}" for name in ("invariance", "contrast") if name in record]
    if "participation_ratio" in record:
        parts.append(f"dimensions {record['participation_ratio']:.0f}")
    parts.append(f"{record['images_per_second']:,.0f} images/s")
    if record["data_wait"] > 0.1:
        parts.append(f"{record['data_wait']:.0%} of it waiting for images")
    parts += [f"kNN {value:.1f} %" for name, value in record.items() if name == "knn_top1_k20"]
    return "  ".join(parts)
