"""Training of a detector, and its evaluation before, during and after."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from tico_ssl.evaluations._detection.drawing import save_sheet
from tico_ssl.evaluations._detection.network import Detector, build_detector
from tico_ssl.evaluations._detection.predicting import find_objects
from tico_ssl.evaluations._detection.samples import Batch, Maker, TrainingSamples
from tico_ssl.evaluations._detection.scoring import Numbers, score
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.evaluations._detection.splits import Splits
from tico_ssl.methods._base import StepOutput
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import calibrate, share_statistics
from tico_ssl.optim.groups import decay_groups, optimizer_of, set_learning_rate
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import autocast, resolve_precision
from tico_ssl.runtime.files import remove_temporaries
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training import loop
from tico_ssl.training.checkpoint import Position, restore, save_checkpoint
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.finite import Watch
from tico_ssl.training.journal import Journal, mean_values
from tico_ssl.training.loop import Course, Hooks
from tico_ssl.training.step import Outcome
from tico_ssl.training.stop import NotFinite, listed


@dataclass(frozen=True)
class Job:
    """A detector to train: data, settings, and the folder of its checkpoint, metrics and picture."""

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
    """Train a detector on a backbone, or resume from its checkpoint, and return its final scores."""
    settings = job.settings
    detector = make_detector(job, backbone)
    optimizer = make_optimizer(detector, settings)
    if distributed.is_main():
        remove_temporaries(job.checkpoint_file)
    begin = restore(job.checkpoint_file, detector, optimizer, job.device)
    maker = Maker(backbone.config.channels, settings.longest, job.masks, backbone.limits)
    feed = TrainingSamples(job.splits.train.pictures, maker, settings)
    moments = _Moments(job, detector, optimizer, feed, begin)
    if begin.step == 0 or not moments.scores:
        with moments.clock.pause():
            moments.score(begin.step)
    detector.train()
    distributed.spread(detector)
    course = Course(begin.step, settings.iterations, settings.seed, job.name, "; the same command continues")
    batches = feed.iterate(begin.step, settings.iterations, job.device)
    loop.train(course, batches, moments.hooks(), moments.clock, moments.display)
    return moments.scores


class _Moments:
    """The loop's callbacks in the training of a detector. `scores` are the latest ones."""

    def __init__(
        self, job: Job, detector: Detector, optimizer: Optimizer, feed: TrainingSamples, begin: Position
    ) -> None:
        self.job, self.detector, self.optimizer, self.feed = job, detector, optimizer, feed
        self.settings, self.steps = job.settings, job.settings.iterations
        self.clock, self.display = Clock(*begin), Display(job.name, self.steps, begin.step)
        self.journal = Journal(job.metrics_file, begin.step)
        self.watch = Watch(detector, optimizer, begin.step)
        self.scores = Numbers()
        for line in self.journal.kept:
            self.scores = {name: value for name, value in line.items() if "_ap" in name} or self.scores

    def hooks(self) -> Hooks[Batch]:
        return Hooks(
            make_step=self.make_step,
            log_due=self.log_due,
            check=self.check,
            log=self.log,
            save_due=self.save_due,
            save=self.save,
            between=self.between,
        )

    def make_step(self, step: int, batch: Batch) -> Outcome:
        set_learning_rate(self.optimizer, self.settings.lr_at(step))
        return make_step(self.detector, self.optimizer, batch, self.job.device, self.job.precision)

    def log_due(self, done: int) -> bool:
        return done % self.settings.log_every == 0 or done == self.steps

    def check(self, done: int, batch: Batch, outcome: Outcome) -> None:
        if faults := self.watch.faults(done, outcome.output):
            what = f"after iteration {done} not finite: {listed(faults)}"
            raise NotFinite(f"{self.job.name}: {what}; lower lr or lengthen warmup_iterations")

    def log(self, done: int, outcome: Outcome) -> None:
        values = mean_values(outcome.output)
        steps, spent = self.clock.lap(done)
        speed = steps * self.settings.batch_size / spent
        clock = {"lr": self.settings.lr_at(done - 1), "images_per_second": speed, "seconds": self.clock.seconds}
        self.journal.write({"step": done, **values, **clock})
        status = f"loss {values['loss']:.3f}  {speed:,.1f} images/s"
        self.display.status(status)
        if self.display.line_due(done):
            say(f"{self.job.name}  iteration {done}/{self.steps}  {status}")

    def between(self, done: int) -> None:
        if done == self.steps or (self.settings.score_every and done % self.settings.score_every == 0):
            self.score(done)
            self.detector.train()

    def score(self, done: int) -> None:
        """Log the scores after `done` iterations."""
        self.scores = measure(self.job, self.detector, self.feed, done)
        self.journal.write({"step": done, **self.scores, "seconds": self.clock.seconds})
        text = "  ".join(f"{name} {value:.1f}" for name, value in self.scores.items())
        say(f"{self.job.name}  after {done} iterations: {text}")

    def save_due(self, done: int) -> bool:
        return done % self.settings.checkpoint_every == 0 or done == self.steps

    def save(self, done: int) -> None:
        self.journal.flush()
        save_checkpoint(self.job.checkpoint_file, done, self.detector, self.optimizer, self.clock.seconds)


def make_detector(job: Job, backbone: Backbone) -> Detector:
    """On its device, with BatchNorm statistics over all processes; new layers depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(job.settings.seed, "weights", 1))
        detector = build_detector(backbone, len(job.splits.train.classes), job.settings, job.masks)
    if job.device.type == "cuda":
        detector = detector.to(memory_format=torch.channels_last)
    return share_statistics(detector.to(job.device))


def make_optimizer(detector: nn.Module, settings: Settings) -> Optimizer:
    """SGD with momentum, or AdamW; no weight decay on normalisation layers, but on biases."""
    norms = {id(p) for m in detector.modules() if isinstance(m, _BatchNorm) for p in m.parameters()}
    groups = decay_groups(detector.parameters(), settings.weight_decay, is_plain=lambda p: id(p) in norms)
    momentum = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    return optimizer_of(settings.optimizer, groups, settings.lr, **momentum)


def make_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, device: torch.device, precision: torch.dtype
) -> Outcome:
    """One step: the sum of a detector's losses."""
    with autocast(device, precision):
        losses: dict[str, Tensor] = model(batch)
    total = torch.stack([value.float() for value in losses.values()]).sum()
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    distributed.average_gradients(model.parameters())
    optimizer.step()
    return Outcome(StepOutput(total.detach(), {name: value.detach() for name, value in losses.items()}))


class _Normalised(nn.Module):
    """The part of a detector with BatchNorm, as a function of one argument, for its calibration."""

    def __init__(self, detector: Detector, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        self.detector, self.device, self.precision = detector, device, precision
        self.whole = any(isinstance(module, _BatchNorm) for module in detector.roi_heads.modules())  # C4

    def forward(self, batch: Batch) -> Any:
        with autocast(self.device, self.precision):
            return self.detector(batch) if self.whole else self.detector.features(batch)


def measure(job: Job, detector: Detector, feed: TrainingSamples, step: int) -> Numbers:
    """Scores on the test images, and on training images if configured; at the last step also the picture."""
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
            detector,
            pictures.pictures,
            feed.maker.channels,
            settings,
            job.device,
            job.precision,
            f"scoring {job.name}",
            feed.maker.limits,
        )
        if distributed.is_main():
            scores = score(pictures, found, job.masks)
            numbers |= {prefix + name: value for name, value in scores.items()}
            if step == settings.iterations and settings.drawn:
                shown = pictures.first(settings.drawn)
                save_sheet(job.folder / f"{prefix}predictions.png", shown.pictures, found, shown.classes)
    shared: Numbers = distributed.everyone(numbers)[0]
    return shared
