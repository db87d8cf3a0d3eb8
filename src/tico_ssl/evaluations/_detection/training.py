"""The loop that trains a detector, and scores it before, during and after."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import TextColumn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from tico_ssl.evaluations._detection.drawing import save_sheet
from tico_ssl.evaluations._detection.network import Detector, build_detector
from tico_ssl.evaluations._detection.predicting import find_objects
from tico_ssl.evaluations._detection.samples import Batch, Maker, TrainingSamples
from tico_ssl.evaluations._detection.scoring import Numbers, score
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.evaluations._detection.splits import Splits
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import calibrate, share_statistics
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import autocast, resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines
from tico_ssl.runtime.progress import bar, say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.checkpoint import Interrupted, StopRequest, load_checkpoint, save_checkpoint

QUIET_LINES = 20  # of progress in a whole training when there is no terminal


@dataclass(frozen=True)
class Job:
    """A detector to train: its data, its settings, and the folder where checkpoint, metrics and picture lie."""

    name: str
    splits: Splits
    settings: Settings
    masks: bool
    folder: Path
    device: torch.device

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        return self.folder / "last.pt"

    @property
    def precision(self) -> torch.dtype:
        return resolve_precision(self.settings.precision, self.device)


def train(job: Job, backbone: Backbone) -> Numbers:
    """Train a detector on a backbone, or go on where its checkpoint is, and return its scores at the end."""
    settings, device = job.settings, job.device
    detector = make_detector(job, backbone)
    optimizer = make_optimizer(detector, settings)
    start, seconds = 0, 0.0
    if job.checkpoint_file.is_file():
        state = load_checkpoint(job.checkpoint_file, detector, optimizer, device)
        start, seconds = state["step"], state["seconds"]
    channels = backbone.config.channels
    feed = TrainingSamples(job.splits.train.pictures, Maker(channels, settings.longest, job.masks), settings)
    journal = Journal(job, start, seconds)
    if start == 0:
        with journal.pause():
            journal.scored(0, measure(job, detector, feed, 0))
    model = DistributedDataParallel(detector, broadcast_buffers=False) if distributed.active() else detector
    detector.train()
    with closing(feed.iterate(start, settings.iterations, device)) as batches, journal.shown(), StopRequest() as stop:
        for step, batch in enumerate(batches, start):
            torch.manual_seed(derived_seed(settings.seed, "network", step, distributed.rank()))
            losses = make_step(model, optimizer, batch, settings.lr_at(step), device, job.precision)
            done = step + 1
            journal.advance(done)
            at_log_step = done % settings.log_every == 0 or done == settings.iterations
            if at_log_step:
                journal.losses(done, losses, settings.lr_at(step))
            if done == settings.iterations or (settings.score_every and done % settings.score_every == 0):
                with journal.pause():
                    journal.scored(done, measure(job, detector, feed, done))
                detector.train()
            stopping = stop.agreed(at_log_step) and done < settings.iterations
            # Last, so that a checkpoint never runs ahead of the metrics.
            if stopping or done % settings.checkpoint_every == 0 or done == settings.iterations:
                if distributed.is_main() and bool(losses["loss"].isfinite()):
                    save_checkpoint(job.checkpoint_file, done, detector, optimizer, journal.seconds)
                distributed.barrier()
            if stopping:
                raise Interrupted(f"stopped after iteration {done} of {settings.iterations}; the same command goes on")
    return journal.final_scores()


def make_detector(job: Job, backbone: Backbone) -> Detector:
    """On its device, with statistics of BatchNorm over all processes; new layers depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(job.settings.seed, "weights", 1))
        detector = build_detector(backbone, len(job.splits.train.classes), job.settings, job.masks)
    if job.device.type == "cuda":
        detector = detector.to(memory_format=torch.channels_last)
    shared: Any = share_statistics(detector.to(job.device))
    return shared


def make_optimizer(detector: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW; normalisation layers have no decay, biases do."""
    norms = {id(p) for m in detector.modules() if isinstance(m, _BatchNorm) for p in m.parameters()}
    groups = [
        {"params": [p for p in detector.parameters() if id(p) not in norms], "weight_decay": settings.weight_decay},
        {"params": [p for p in detector.parameters() if id(p) in norms], "weight_decay": 0.0},
    ]
    form: Any = {"fused": True} if next(detector.parameters()).is_cuda else {"foreach": True}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, **form)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, **form)


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    lr: float,
    device: torch.device,
    precision: torch.dtype,
) -> dict[str, Tensor]:
    """One step; returns the losses."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with autocast(device, precision):
        losses: dict[str, Tensor] = model(batch)
    total = torch.stack([value.float() for value in losses.values()]).sum()
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    optimizer.step()
    return {"loss": total.detach()} | {name: value.detach() for name, value in losses.items()}


class _Normalised(nn.Module):
    """The part of a detector that has BatchNorm, as a function of one argument, for its calibration."""

    def __init__(self, detector: Detector, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        self.detector, self.device, self.precision = detector, device, precision
        self.whole = any(isinstance(module, _BatchNorm) for module in detector.roi_heads.modules())  # C4

    def forward(self, batch: Batch) -> Any:
        with autocast(self.device, self.precision):
            return self.detector(batch) if self.whole else self.detector.features(batch)


def measure(job: Job, detector: Detector, feed: TrainingSamples, step: int) -> Numbers:
    """Scores on the test images, and on training images where that is wanted; the last time also the picture."""
    settings, numbers = job.settings, Numbers()
    if settings.precise_norm:
        torch.manual_seed(derived_seed(settings.seed, "network", step, distributed.rank(), 1))
        batches: Any = feed.iterate(settings.iterations, settings.iterations + settings.precise_norm, job.device)
        calibrate(_Normalised(detector, job.device, job.precision), batches)
    wanted = {"": job.splits.test}
    if settings.score_train_images:
        wanted["train_"] = job.splits.train.spread(settings.score_train_images)
    for prefix, pictures in wanted.items():
        found = find_objects(
            detector, pictures.pictures, feed.maker.channels, settings, job.device, job.precision, f"scoring {job.name}"
        )
        if distributed.is_main():
            scores = score(pictures, found, job.masks)
            numbers |= {prefix + name: value for name, value in scores.items()}
            if step == settings.iterations and settings.drawn:
                shown = pictures.first(settings.drawn)
                save_sheet(job.folder / f"{prefix}predictions.png", shown.pictures, found, shown.classes)
    shared: Numbers = distributed.everyone(numbers)[0]
    return shared


class Journal:
    """Writes metrics.jsonl and shows how training goes; the main process writes, the others keep silent."""

    def __init__(self, job: Job, start: int, seconds: float) -> None:
        self.job, self.before, self.begun = job, seconds, time.perf_counter()
        self.last = (start, self.begun)
        self.paused = 0.0
        self.lines = [line for line in read_json_lines(job.metrics_file) if line["step"] <= start]
        distributed.barrier()  # all have read before one writes
        if distributed.is_main():
            job.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(job.metrics_file, "".join(json.dumps(line) + "\n" for line in self.lines))
        self.bar = bar(TextColumn("{task.fields[status]}"))
        self.task = self.bar.add_task(job.name, total=job.settings.iterations, completed=start, status="")

    @property
    def seconds(self) -> float:
        """Spent on this training, interruptions left out."""
        return self.before + time.perf_counter() - self.begun

    @contextmanager
    def shown(self) -> Iterator[None]:
        """With the bar on the terminal."""
        with self.bar:
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is left out of images per second."""
        before = time.perf_counter()
        yield
        self.paused += time.perf_counter() - before

    def advance(self, step: int) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=step)

    def losses(self, step: int, losses: dict[str, Tensor], lr: float) -> None:
        """The losses of a step, of all processes together. The only place of the loop that waits for the device."""
        means = distributed.all_mean(torch.stack([value.float() for value in losses.values()])).tolist()
        values = dict(zip(losses, means))
        now = time.perf_counter()
        images = (step - self.last[0]) * self.job.settings.batch_size
        speed = images / max(1e-9, now - self.last[1] - self.paused)
        self.last, self.paused = (step, now), 0.0
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"{self.job.name}: the loss became {values['loss']} at or before iteration {step}: "
                "lower lr or lengthen warmup_iterations"
            )
        self._write({"step": step, **values, "lr": lr, "images_per_second": speed, "seconds": self.seconds})
        status = f"loss {values['loss']:.3f}  {speed:,.1f} images/s"
        self.bar.update(self.task, status=status)
        every = self.job.settings.log_every * max(
            1, self.job.settings.iterations // self.job.settings.log_every // QUIET_LINES
        )
        if self.bar.disable and (step % every == 0 or step == self.job.settings.iterations):
            say(f"{self.job.name}  iteration {step}/{self.job.settings.iterations}  {status}")

    def scored(self, step: int, numbers: Numbers) -> None:
        """The scores after so many iterations."""
        self._write({"step": step, **numbers, "seconds": self.seconds})
        text = "  ".join(f"{name} {value:.1f}" for name, value in numbers.items())
        say(f"{self.job.name}  after {step} iterations: {text}")

    def final_scores(self) -> Numbers:
        """Those after the last iteration."""
        return next(
            {name: value for name, value in line.items() if "_ap" in name}
            for line in reversed(self.lines)
            if line["step"] == self.job.settings.iterations and any("_ap" in name for name in line)
        )

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if distributed.is_main():
            append_json_line(self.job.metrics_file, line)
