"""The loop that trains a classifier on labelled images: on a frozen backbone, or together with it.

It goes on where it was stopped, to the bit on a CPU: order and crops are functions of seed and step.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.progress import TextColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.settings import Settings
from tico_ssl.features.cache import weights_digest
from tico_ssl.methods._base import Batch, StepOutput
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import bar, say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.checkpoint import Interrupted, StopRequest, load_checkpoint, save_checkpoint
from tico_ssl.training.step import Step
from tico_ssl.views.executor import Views

CHECKPOINT_SECONDS = 30.0  # between two, at least
QUIET_LINES = 5  # of progress in a training when there is no terminal


class Classifier(nn.Module):
    """A backbone and linear heads on its features; heads learn independently, each at a rate of its own."""

    def __init__(self, backbone: Backbone, classes: int, heads: int, frozen: bool, batch_norm: bool, seed: int) -> None:
        super().__init__()
        self.backbone, self.frozen = backbone.requires_grad_(not frozen), frozen
        self.heads = nn.ModuleList(_head(backbone.width, classes, batch_norm, seed) for _ in range(heads))

    def forward(self, batch: Batch) -> StepOutput:
        """The sum of the heads' cross entropies, whose gradient for each head is that of its own."""
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

    def after_step(self, progress: float | Tensor) -> dict[str, float | Tensor]:
        """Nothing moves but the weights."""
        return {}

    @property
    def learning(self) -> nn.Module:
        """What a checkpoint has to hold."""
        return self.heads if self.frozen else self

    @torch.no_grad()
    def scores(self, features: Tensor, chunk: int = 8192) -> list[Tensor]:
        """What each head makes of features, on the CPU."""
        device = next(self.heads.parameters()).device
        self.heads.eval()
        return [torch.cat([head(part.to(device)).cpu() for part in features.split(chunk)]) for head in self.heads]


def _head(width: int, classes: int, batch_norm: bool, seed: int) -> nn.Module:
    linear = nn.Linear(width, classes)
    begin = torch.Generator().manual_seed(derived_seed(seed, "probe"))
    nn.init.normal_(linear.weight, std=0.01, generator=begin)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.BatchNorm1d(width, affine=False), linear) if batch_norm else linear


@dataclass(frozen=True)
class Job:
    """A classifier to train: on which images (decoded for its crops), by which settings, with its checkpoint's file."""

    name: str
    train: Source
    classes: int
    settings: Settings
    device: torch.device
    checkpoint_file: Path | None = None


def train_classifier(
    job: Job, backbone: Backbone, head_rates: Sequence[float], backbone_rate: float | None, batch_norm: bool = False
) -> Classifier:
    """Train one head for each rate, and the backbone if it has a rate; without one it is frozen to the bit."""
    frozen = backbone_rate is None
    before = weights_digest(backbone) if frozen else ""
    classifier = Classifier(backbone, job.classes, len(head_rates), frozen, batch_norm, job.settings.seed)
    classifier = classifier.to(job.device).to(memory_format=torch.channels_last).train()
    share_statistics(classifier)
    _learn(job, classifier, make_optimizer(classifier, head_rates, backbone_rate, job.settings))
    gc.collect()  # a step that was recorded on a GPU refers to itself, and keeps its memory until it is found
    if frozen and weights_digest(classifier.backbone) != before:
        raise AssertionError(f"{job.name}: a frozen backbone has changed")
    return classifier.eval()


def _learn(job: Job, classifier: Classifier, optimizer: torch.optim.Optimizer) -> None:
    """All steps, or those after the checkpoint."""
    settings, device, backbone = job.settings, job.device, classifier.backbone
    precision = resolve_precision(settings.precision, device)
    views = Views([settings.policy()], backbone.image_size, backbone.mean, backbone.std, precision)
    loader = Loader(job.train, views, _batch_size(job), settings.seed, device, default_workers())
    steps = loader.steps_per_epoch * settings.epochs_of(loader.steps_per_epoch)
    start, seconds = 0, 0.0
    if job.checkpoint_file is not None and job.checkpoint_file.is_file():
        state = load_checkpoint(job.checkpoint_file, classifier.learning, optimizer, device)
        start, seconds = state["step"], state["seconds"]
    model = DistributedDataParallel(classifier, broadcast_buffers=False) if distributed.active() else classifier
    make_step = Step(classifier, model, optimizer, views, precision, device)
    clock = _Clock(seconds)
    show = _Progress(job.name, steps, start)
    with show.bar, StopRequest() as stop:
        for step, portion in enumerate(loader.iterate(start, steps), start):
            torch.manual_seed(derived_seed(settings.seed, "network", step, distributed.rank()))
            outcome = make_step(portion, settings.share_of_rate(step, steps), step / steps)
            done = step + 1
            ended = done % loader.steps_per_epoch == 0
            if ended:
                show.epoch(done, loader.steps_per_epoch, _least_loss(job.name, outcome.output.terms["losses"]))
            stopping = stop.agreed(ended) and done < steps
            due = stopping or (ended and done < steps and distributed.anyone(clock.since_saved > CHECKPOINT_SECONDS))
            if due and job.checkpoint_file is not None:
                _save(job.checkpoint_file, done, classifier, optimizer, clock)
            if stopping:
                hint = "" if job.checkpoint_file is None else "; the same command goes on"
                raise Interrupted(f"{job.name}: stopped after step {done} of {steps}{hint}")


def make_optimizer(
    classifier: Classifier, head_rates: Sequence[float], backbone_rate: float | None, settings: Settings
) -> torch.optim.SGD:
    """SGD, with the rate of each part as `lr_ratio`, which the schedule's share of a step multiplies."""
    parts = [(head, rate) for head, rate in zip(classifier.heads, head_rates, strict=True)]
    if backbone_rate is not None:
        parts.append((classifier.backbone, backbone_rate))
    groups = []
    for part, rate in parts:
        for weights, decay in ((True, settings.weight_decay), (False, 0.0)):
            chosen = [parameter for parameter in part.parameters() if (parameter.ndim > 1) == weights]
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay, "lr_ratio": rate})
    device = next(classifier.heads.parameters()).device
    on_gpu = device.type == "cuda"  # where a recorded step reads its rate from a tensor
    for group in groups:
        group["lr"] = torch.tensor(0.0, device=device) if on_gpu else 0.0
    form = {"fused": True} if on_gpu else {"foreach": True}
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov, **form)


def classes_of(train: Source, test: Source) -> int:
    """How many classes the labels of both splits count."""
    most = max(int(labels.max()) for labels in (train.labels, test.labels) if labels is not None)
    return max(len(train.classes), most + 1)


def _batch_size(job: Job) -> int:
    """As many as are wanted or there, in equal parts for all processes."""
    world = distributed.world_size()
    size = min(job.settings.batch_size, len(job.train)) // world * world
    if size < 2 * world:
        raise UserError(f"{job.name}: {len(job.train)} training image(s) are too few")
    return size


def _save(path: Path, done: int, classifier: Classifier, optimizer: torch.optim.Optimizer, clock: "_Clock") -> None:
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, done, classifier.learning, optimizer, clock.seconds)
    distributed.barrier()
    clock.saved()


def _least_loss(name: str, losses: Tensor) -> float:
    """Of all heads: one that diverges at a high rate is a finding, all of them a mistake."""
    finite = [value for value in losses.tolist() if math.isfinite(value)]
    if not finite:
        raise UserError(f"{name}: the loss is not finite any more; lower the learning rate")
    return min(finite)


class _Clock:
    """Seconds of training, those before an interruption included."""

    def __init__(self, before: float) -> None:
        self.before, self.begun = before, perf_counter()
        self.last = self.begun

    @property
    def seconds(self) -> float:
        return self.before + perf_counter() - self.begun

    @property
    def since_saved(self) -> float:
        return perf_counter() - self.last

    def saved(self) -> None:
        self.last = perf_counter()


class _Progress:
    """A bar on a terminal, a few lines elsewhere."""

    def __init__(self, name: str, steps: int, start: int) -> None:
        self.name, self.steps, self.lines = name, steps, QUIET_LINES * start // steps
        self.bar = bar(TextColumn("{task.fields[status]}"))
        self.task = self.bar.add_task(name, total=steps, completed=start, status="")

    def epoch(self, done: int, steps_per_epoch: int, loss: float) -> None:
        """After each."""
        epochs = self.steps // steps_per_epoch
        self.bar.update(self.task, completed=done, status=f"loss {loss:.3f}")
        if self.bar.disable and QUIET_LINES * done // self.steps > self.lines:
            self.lines = QUIET_LINES * done // self.steps
            say(f"{self.name}  epoch {done // steps_per_epoch}/{epochs}  loss {loss:.3f}")
