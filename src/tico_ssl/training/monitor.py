"""What happens during training, for people and for files: metrics, progress, and the signs of collapse."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.progress import TextColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from tico_ssl.methods._base import Method, StepOutput
from tico_ssl.results.collapse import collapse_signs
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines
from tico_ssl.runtime.progress import bar, say

QUIET_LINES = 20  # lines of progress in a whole run when there is no terminal
RANK_IMAGES = 256  # of the global batch, whose embeddings are decomposed at log steps: some milliseconds
FEWEST_DIMENSIONS = 10  # that images and embedding must allow, for a rank to say something about collapse
SPECTRUM_RANKS = 128  # eigenvalues of an epoch that are kept, at most: the first ones, and ever fewer of the others


class Monitor:
    """Writes metrics.jsonl, TensorBoard events and train.log, and draws the progress bar; in the main process only."""

    def __init__(self, run: Run, total_steps: int, batch_size: int, start: int, seconds: float) -> None:
        self.run, self.total_steps, self.batch_size = run, total_steps, batch_size
        self.start, self.seconds_before, self.begun = start, seconds, time.perf_counter()
        self._last = (start, self.begun)
        self._warned: set[str] = set()
        self._latest: dict[str, float] = {}
        self._paused = 0.0
        self.writer: SummaryWriter | None = None
        if distributed.is_main():
            for file in (path for path in (run.metrics_file, run.spectrum_file) if path.is_file()):
                kept = [line for line in read_json_lines(file) if line["step"] <= start]
                write_atomically(file, "".join(json.dumps(line) + "\n" for line in kept))
            self.writer = SummaryWriter(str(run.folder), purge_step=start)
        self.progress = bar(TextColumn("{task.fields[status]}"))
        self.task = self.progress.add_task("pretraining", total=total_steps, completed=start, status="")

    def __enter__(self) -> "Monitor":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.writer:
            self.writer.close()

    @property
    def seconds(self) -> float:
        """Time spent on this run, interruptions left out."""
        return self.seconds_before + time.perf_counter() - self.begun

    def note(self, text: str) -> None:
        """A line for the user and for train.log."""
        note(self.run.folder, text)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not spent on training steps, left out of images per second."""
        before = time.perf_counter()
        yield
        self._paused += time.perf_counter() - before

    def log(
        self, step: int, epoch: float, values: dict[str, float], method: Method, after_warmup: bool, waited: float
    ) -> None:
        """Record the values of a log step, look for trouble, and show them. `waited`: seconds without images."""
        now = time.perf_counter()
        done = (step - self._last[0]) * self.batch_size
        spent = max(1e-9, now - self._last[1] - self._paused)
        self._last, self._paused = (step, now), 0.0
        clock = {"images_per_second": done / spent, "data_wait": waited / spent, "seconds": self.seconds}
        record = {"step": step, "epoch": round(epoch, 4), **values, **clock}
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"the loss became {values['loss']} at or before step {step}: lower optimizer.lr, lengthen "
                "optimizer.warmup_epochs or set training.clip_gradient; the last checkpoint is from before"
            )
        self._latest = {}
        self.write(record)
        if self.writer and float(epoch).is_integer() and (found := spectrum(method)) is not None:
            append_json_line(self.run.spectrum_file, {"step": step, "epoch": round(epoch), **found})
        if after_warmup:
            self._warn_of_collapse(values, method)
        self.progress.update(self.task, status=_status(record))

    def advance(self, step: int) -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=step)

    def write(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl and to TensorBoard."""
        self._latest = self._latest | record
        if not self.writer:
            return
        append_json_line(self.run.metrics_file, record)
        for name, value in record.items():
            if name not in ("step", "epoch"):
                self.writer.add_scalar(name, value, record["step"])

    def show(self, name: str, picture: Path) -> None:
        """Add a picture to TensorBoard."""
        if self.writer:
            with Image.open(picture) as opened:
                self.writer.add_image(name, np.asarray(opened.convert("RGB")), self.start, dataformats="HWC")

    def epoch_ended(self, epoch: int, epochs: int, bad_files: int = 0) -> None:
        """One line in the log; on the console when there is no bar, and then only so many."""
        text = f"epoch {epoch}/{epochs}  {_status(self._latest)}"
        text += f"  {bad_files} bad files left out" if bad_files else ""
        quiet = self.progress.disable and epoch % max(1, math.ceil(epochs / QUIET_LINES)) and epoch != epochs
        note(self.run.folder, text, silent=bool(quiet) or not self.progress.disable)

    def _warn_of_collapse(self, values: dict[str, float], method: Method) -> None:
        for name, text in collapse_signs(values, method.collapsed_loss()).items():
            if name not in self._warned:
                self._warned.add(name)
                self.note(f"warning: this looks like collapse: {text}")


def note(folder: Path, text: str, silent: bool = False) -> None:
    """A line in train.log, and on the console unless silent. Main process only."""
    if not distributed.is_main():
        return
    with (folder / "train.log").open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
    if not silent:
        say(text)


def measure(output: StepOutput, method: Method, extra: dict[str, Any]) -> dict[str, float]:
    """The values of a log step, of the global batch. The only place of the loop that waits for the device."""
    names = ["loss", *output.terms]
    tensors = torch.stack([output.loss.detach(), *(term.detach() for term in output.terms.values())]).float()
    values = dict(zip(names, distributed.all_mean(tensors).tolist()))
    if not math.isfinite(values["loss"]):
        return values  # the monitor stops the run; eigenvalues of NaN are an error of their own
    if output.embedding is not None:
        values |= {name: float(value) for name, value in spread(output.embedding).items()}
        values |= {name: float(value) for name, value in occupied(output.embedding).items()}
    return values | {name: float(value) for name, value in (method.diagnostics() | extra).items()}


def spread(embedding: Tensor) -> dict[str, Tensor]:
    """How far apart different images lie on the sphere: deviation per dimension, and their mean cosine."""
    z = F.normalize(embedding.float(), dim=1)
    mean, square = distributed.all_mean(torch.stack([z.mean(0), z.square().mean(0)]))
    n = len(z) * distributed.world_size()
    return {
        "embedding_std": (square - mean.square()).clamp_min(0).sqrt().mean(),
        "mean_cosine": (n * mean.square().sum() - 1) / (n - 1),
    }


@torch.no_grad()
def spectrum(method: Method) -> dict[str, list[float]] | None:
    """Eigenvalues of the method's covariance as shares of all variation, largest first, with their ranks; None if it
    keeps no covariance. Asked for at a log step, which waits for the device anyway, and nothing is written to."""
    covariance = method.covariance()
    if covariance is None:
        return None
    values = torch.linalg.eigvalsh(covariance.double()).flip(0).clamp_min(0)
    shares = (values / values.sum().clamp_min(1e-300)).tolist()
    ranks = np.unique(np.geomspace(1, len(shares), SPECTRUM_RANKS).round().astype(int)).tolist()
    return {"ranks": ranks, "shares": [float(f"{shares[rank - 1]:.4g}") for rank in ranks]}


def occupied(embedding: Tensor) -> dict[str, Tensor]:
    """How much of the sphere images fill: RankMe of their embeddings, and uniformity (Wang and Isola, t = 2).

    Of the first images of the global batch, by the matrix of their cosines. In float64: in float32, rounding alone
    would make three dimensions of a point.
    """
    share = max(1, RANK_IMAGES // distributed.world_size())
    z = F.normalize(distributed.gathered(embedding[:share].double()), dim=1)
    n = len(z)
    if min(z.shape) < FEWEST_DIMENSIONS:
        return {}
    cosines = z @ z.T
    singular = torch.linalg.eigvalsh(cosines)[-min(z.shape) :].clamp_min(0).sqrt()  # there are no more
    shares = singular / singular.sum() + 1e-7
    near = torch.exp(4 * (cosines - 1).clamp_max(0)).sum() - n  # an image is no neighbour of itself
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
