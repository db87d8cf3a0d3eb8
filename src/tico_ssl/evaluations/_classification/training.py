"""Training a classifier on labelled images: on a frozen backbone, or together with it.

An interrupted training resumes, bitwise-identical on a CPU: order and crops are functions of seed and step.
"""

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.settings import Settings
from tico_ssl.features.lazy import weights_digest
from tico_ssl.methods._base import Batch, Method, StepOutput
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.optim.groups import decay_groups, optimizer_of
from tico_ssl.pipeline.loader import Loader, RawBatch
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training import loop
from tico_ssl.training.checkpoint import Position, restore, save_checkpoint
from tico_ssl.training.clock import Clock
from tico_ssl.training.display import Display
from tico_ssl.training.journal import check_finite
from tico_ssl.training.loop import Course, Hooks
from tico_ssl.training.step import Outcome, Step
from tico_ssl.views.executor import Views

CHECKPOINT_SECONDS = 30.0  # between checkpoints, at least
LINES = 5  # of progress per training without a terminal


class Classifier(Method):
    """A backbone and linear heads on its features; heads learn independently, each at its own learning rate."""

    def __init__(self, backbone: Backbone, classes: int, heads: int, frozen: bool, batch_norm: bool, seed: int) -> None:
        super().__init__(backbone.requires_grad_(not frozen))
        self.frozen = frozen
        self.heads = nn.ModuleList(_head(backbone.width, classes, batch_norm, seed) for _ in range(heads))

    def forward(self, batch: Batch) -> StepOutput:
        """The sum of the heads' cross-entropies; each head gets the gradient of its own."""
        with torch.set_grad_enabled(not self.frozen):
            features = self.backbone(batch.views[0])
        logits = [head(features).float() for head in self.heads]
        assert batch.label is not None
        losses = torch.stack([F.cross_entropy(each, batch.label) for each in logits])
        return StepOutput(losses.sum(), {"losses": losses.detach()})

    def train(self, mode: bool = True) -> "Classifier":
        """A frozen backbone stays in evaluation mode, with the statistics of its pretraining."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    @property
    def learning(self) -> nn.Module:
        """The modules in a checkpoint."""
        return self.heads if self.frozen else self

    @torch.no_grad()
    def scores(self, features: Tensor, chunk: int = 8192) -> list[Tensor]:
        """Logits of each head, on the CPU."""
        device = next(self.heads.parameters()).device
        self.heads.eval()
        return [torch.cat([head(part.to(device)).cpu() for part in features.split(chunk)]) for head in self.heads]


def _head(width: int, classes: int, batch_norm: bool, seed: int) -> nn.Module:
    """A linear layer, optionally after an affine BatchNorm (VISSL, models/heads/linear_eval_mlp.py)."""
    linear = nn.Linear(width, classes)
    begin = torch.Generator().manual_seed(derived_seed(seed, "probe"))
    nn.init.normal_(linear.weight, std=0.01, generator=begin)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.BatchNorm1d(width), linear) if batch_norm else linear


@dataclass(frozen=True)
class Job:
    """A classifier to train: images (decoded for its crops), settings, and the checkpoint's path."""

    name: str
    train: Source
    classes: int
    settings: Settings
    device: torch.device
    checkpoint_file: Path | None = None
    after_epoch: Callable[[int, int, Classifier], None] | None = None
    """Called in every process after an epoch, with its number and that of all; the classifier is in training mode."""
    bad: BadFiles | None = None
    """Takes what cannot be read."""


def train_classifier(
    job: Job, backbone: Backbone, head_rates: Sequence[float], backbone_rate: float | None, batch_norm: bool = False
) -> Classifier:
    """Train one head per learning rate, and the backbone if it has one; otherwise it is frozen."""
    frozen = backbone_rate is None
    before = weights_digest(backbone) if frozen else ""
    classifier = Classifier(backbone, job.classes, len(head_rates), frozen, batch_norm, job.settings.seed)
    classifier = classifier.to(job.device).to(memory_format=torch.channels_last).train()
    share_statistics(classifier)
    _learn(job, classifier, make_optimizer(classifier, head_rates, backbone_rate, job.settings))
    gc.collect()  # a captured step is a reference cycle, which keeps its GPU memory until collected
    if frozen and weights_digest(classifier.backbone) != before:
        raise AssertionError(f"{job.name}: a frozen backbone has changed")
    return classifier.eval()


def _learn(job: Job, classifier: Classifier, optimizer: Optimizer) -> None:
    """All steps, or those after the checkpoint."""
    settings, device, backbone = job.settings, job.device, classifier.backbone
    precision = resolve_precision(settings.precision, device)
    views = Views([settings.policy()], backbone.image_size, backbone.mean, backbone.std, precision)
    loader = Loader(job.train, views, _batch_size(job), settings.seed, device, default_workers(), job.bad)
    begin = restore(job.checkpoint_file, classifier.learning, optimizer, device)
    distributed.spread(classifier)
    step = Step(classifier, optimizer, views, precision, device)
    moments = _Moments(job, classifier, optimizer, step, loader.steps_per_epoch, begin)
    go_on = "" if job.checkpoint_file is None else "; the same command continues"
    course = Course(begin.step, moments.steps, settings.seed, job.name, go_on)
    batches = loader.iterate(begin.step, moments.steps)
    with closing(step):
        loop.train(course, batches, moments.hooks(), moments.clock, moments.display)


class _Moments:
    """The loop's callbacks in the training of a classifier."""

    def __init__(
        self,
        job: Job,
        classifier: Classifier,
        optimizer: Optimizer,
        step: Step,
        steps_per_epoch: int,
        begin: Position,
    ) -> None:
        self.job, self.classifier, self.optimizer, self.step = job, classifier, optimizer, step
        self.steps_per_epoch, self.epochs = steps_per_epoch, job.settings.epochs_of(steps_per_epoch)
        self.steps = self.epochs * steps_per_epoch
        self.clock, self.display = Clock(*begin), Display(job.name, self.steps, begin.step, LINES)

    def hooks(self) -> Hooks[RawBatch]:
        return Hooks(
            make_step=self.make_step,
            log_due=self.epoch_ended,
            log=self.log,
            save_due=self.save_due,
            save=self.save,
            between=self.between,
            check=self.check,
        )

    def make_step(self, step: int, raw: RawBatch) -> Outcome:
        return self.step(raw, self.job.settings.share_of_rate(step, self.steps), step / self.steps)

    def epoch_ended(self, done: int) -> bool:
        return done % self.steps_per_epoch == 0

    def check(self, done: int, raw: RawBatch, outcome: Outcome) -> None:
        """One head that diverges at a high learning rate is a finding, all are an error."""
        check_finite(_lowest_loss(outcome), done, "lower the learning rate", self.job.name)

    def log(self, done: int, outcome: Outcome) -> None:
        loss = _lowest_loss(outcome)
        self.display.status(f"loss {loss:.3f}")
        if self.display.line_due(done):
            say(f"{self.job.name}  epoch {done // self.steps_per_epoch}/{self.epochs}  loss {loss:.3f}")

    def between(self, done: int) -> None:
        if self.job.after_epoch is not None and self.epoch_ended(done):
            self.job.after_epoch(done // self.steps_per_epoch, self.epochs, self.classifier)

    def save_due(self, done: int) -> bool:
        between = self.epoch_ended(done) and done < self.steps
        return between and distributed.anyone(self.clock.since_saved > CHECKPOINT_SECONDS)

    def save(self, done: int) -> None:
        if self.job.checkpoint_file is not None:
            seconds = self.clock.seconds
            save_checkpoint(self.job.checkpoint_file, done, self.classifier.learning, self.optimizer, seconds)


def _lowest_loss(outcome: Outcome) -> float:
    """The lowest finite loss of all heads; another if none is finite."""
    losses: list[float] = outcome.output.terms["losses"].tolist()
    return min(losses, key=lambda value: value if math.isfinite(value) else math.inf)


def make_optimizer(
    classifier: Classifier, head_rates: Sequence[float], backbone_rate: float | None, settings: Settings
) -> Optimizer:
    """SGD, with the learning rate of each part as `lr_ratio`, which the schedule multiplies."""
    parts: list[tuple[nn.Module, float]] = list(zip(classifier.heads, head_rates, strict=True))
    if backbone_rate is not None:
        parts.append((classifier.backbone, backbone_rate))
    groups = [group for part, rate in parts for group in decay_groups(part.parameters(), settings.weight_decay, rate)]
    return optimizer_of("sgd", groups, 0.0, momentum=settings.momentum, nesterov=settings.nesterov)


def classes_of(train: Source, test: Source) -> int:
    """Number of classes in both splits."""
    most = max(int(labels.max()) for labels in (train.labels, test.labels) if labels is not None)
    return max(len(train.classes), most + 1)


def _batch_size(job: Job) -> int:
    world = distributed.world_size()
    size = job.settings.batch_of(len(job.train), world)
    if size < 2 * world:
        raise UserError(f"{job.name}: too few training images ({len(job.train)})")
    return size
