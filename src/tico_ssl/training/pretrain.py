"""The loop: images, views, loss, gradient, step, target. One function, from top to bottom."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.config.views import shorter_side
from tico_ssl.data.bad_files import BadFiles, readable, survey
from tico_ssl.data.source import Source
from tico_ssl.data.sources import Given, as_source, open_training
from tico_ssl.methods._base import Method, StepOutput
from tico_ssl.methods._base import build_method as method_of
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.fused import fuse
from tico_ssl.networks.recomputing import recompute_blocks
from tico_ssl.networks.storage import save_backbone
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.optim.schedules import scaled_lr, warmup_cosine
from tico_ssl.pipeline.loader import Loader
from tico_ssl.pipeline.sheet import COLUMNS, save_contact_sheet
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.results.run_folder import Run, admit, create_run
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import choose_device, resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training.checkpoint import Interrupted, StopRequest, load_checkpoint, save_checkpoint
from tico_ssl.training.monitor import Monitor, measure, note
from tico_ssl.training.online_knn import OnlineKnn
from tico_ssl.training.step import Step, resolve_execution
from tico_ssl.views.executor import Views, by_kernels
from tico_ssl.views.table import left_out


def pretrain(
    recipe: str | Path | Mapping[str, Any] = "demo",
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Train a backbone by a recipe. `resume` goes on with a run that is there and begins one that is not."""
    changes = dict(overrides or {})
    if data is not None:
        changes["data.source"] = as_source(data)
    loaded = load_recipe(recipe, changes)
    run = Run(Path(out).expanduser() if out is not None else default_folder(recipe))
    device = choose_device()
    with distributed.session(device):
        admit(run.folder, loaded, resume, overwrite)
        train(loaded, run, device, overwrite)
    return run


def default_folder(recipe: str | Path | Mapping[str, Any]) -> Path:
    """runs/ and the recipe's name."""
    if isinstance(recipe, Mapping):
        return Path("runs") / "run"
    is_file = Path(recipe).suffix in (".yaml", ".yml")
    return Path("runs") / (Path(recipe).stem if is_file else str(recipe).replace("/", "-"))


def train(recipe: Recipe[Any], run: Run, device: torch.device, overwrite: bool = False) -> None:
    """Everything between a recipe and a trained backbone in its run folder."""
    settings, seed = recipe.training, recipe.training.seed
    if settings.parts > 1 and distributed.active():
        raise UserError("training.parts is for one process: several share a batch already")
    shorter = shorter_side(recipe.views, recipe.data.image_size)
    source = open_training(recipe.data, recipe.backbone.channels, shorter)
    bad = BadFiles()
    workers = settings.workers or default_workers()
    survey(source, recipe.data.most_bad, bad, workers)
    precision = resolve_precision(settings.precision, device)
    views = Views(recipe.views, recipe.data.image_size, recipe.data.mean, recipe.data.std, precision)
    loader = Loader(source, views, settings.batch_size, seed, device, workers, bad, recipe.data.on_gpu)
    plan = Plan.of(recipe, loader.steps_per_epoch)
    method = build_method(recipe, device, precision)
    method.check_data(len(source), source.labels)
    optimizer = build_optimizer(method, recipe.optimizer)
    distributed.barrier()  # every process has looked at the folder before the main one writes to it
    if distributed.is_main():
        create_run(run.folder, recipe, overwrite)
    distributed.barrier()
    start, seconds = 0, 0.0
    if run.checkpoint_file.is_file():
        state = load_checkpoint(run.checkpoint_file, method, optimizer, device)
        start, seconds = state["step"], state["seconds"]
    _announce(recipe, run, source, loader, plan, method, device, precision, start)
    if start == plan.steps:
        return
    model = DistributedDataParallel(method, broadcast_buffers=False) if distributed.active() else method
    make_step = Step(
        method,
        model,
        optimizer,
        views,
        precision,
        device,
        settings.clip_gradient,
        settings.execution,
        settings.parts,
    )
    knn = OnlineKnn.of(recipe, source, device)

    saved = -math.inf
    with Monitor(run, plan.steps, settings.batch_size, start, seconds) as monitor, StopRequest() as stop:
        for step, portion in enumerate(loader.iterate(start, plan.steps), start):
            if step == 0 and distributed.is_main():
                originals = [readable(source, place, bad) for place in portion.index[:COLUMNS].tolist()]
                made = views.make(portion.pixels, portion.decisions)
                save_contact_sheet(run.folder / "views.png", originals, made, views)
                monitor.show("views", run.folder / "views.png")
            torch.manual_seed(derived_seed(seed, "network", step, distributed.rank()))
            lr = plan.lr(step)
            outcome = make_step(portion, lr, step / plan.steps)

            done = step + 1
            monitor.advance(done)
            epoch, in_epoch = divmod(done, plan.steps_per_epoch)
            at_log_step = done % settings.log_every_steps == 0 or in_epoch == 0
            if at_log_step:
                values = measure(outcome.output, method, outcome.extra | {"lr": lr})
                waited = loader.take_waited()
                monitor.log(done, done / plan.steps_per_epoch, values, method, step >= plan.warmup, waited)
            stopping = stop.agreed(at_log_step) and done < plan.steps
            with monitor.pause():  # what follows is not training time
                if in_epoch == 0:
                    if knn is not None and plan.due(done, settings.knn_every_epochs):
                        monitor.write({"step": done, "epoch": epoch, **knn.measure(method.backbone)})
                    bad.write(run.bad_files_file)
                    monitor.epoch_ended(epoch, settings.epochs, len(bad))
                # Last, so that a checkpoint never runs ahead of the metrics.
                late = plan.due(done, settings.checkpoint_every_epochs) and distributed.anyone(
                    monitor.seconds - saved > settings.checkpoint_seconds
                )
                if late or stopping or done == plan.steps:
                    save(run, done, method, optimizer, outcome.output, monitor)
                    saved = monitor.seconds
            if stopping:
                raise Interrupted(f"stopped after step {done} of {plan.steps}; continue with --resume")
        monitor.note(f"trained in {monitor.seconds:,.0f} s")


@dataclass(frozen=True)
class Plan:
    """The run in steps, and the learning rate of each."""

    steps_per_epoch: int
    steps: int
    warmup: int
    peak_lr: float
    end_lr: float

    @classmethod
    def of(cls, recipe: Recipe[Any], steps_per_epoch: int) -> "Plan":
        """The plan of a recipe for a number of images."""
        optimizer, steps = recipe.optimizer, steps_per_epoch * recipe.training.epochs
        peak = scaled_lr(optimizer.lr, recipe.training.batch_size) if optimizer.scale_lr else optimizer.lr
        warmup = min(round(optimizer.warmup_epochs * steps_per_epoch), steps - 1)
        return cls(steps_per_epoch, steps, warmup, peak, peak * optimizer.end_lr_ratio)

    def due(self, done: int, every_epochs: int) -> bool:
        """Whether something that happens every so many epochs, and after the last, happens after this many steps."""
        return done == self.steps or done % (self.steps_per_epoch * every_epochs) == 0

    def lr(self, step: int) -> float:
        """Of one step."""
        return warmup_cosine(step, self.steps, self.warmup, self.peak_lr, self.end_lr)


def build_method(recipe: Recipe[Any], device: torch.device, precision: torch.dtype, fused: bool = True) -> Method:
    """The method of a recipe with fresh weights, on its device, in training mode; where steps are captured, with fused
    BatchNorm unless told otherwise."""
    torch.manual_seed(derived_seed(recipe.training.seed, "weights"))
    data = recipe.data
    backbone = build_backbone(recipe.backbone, data.image_size, data.mean, data.std)
    method = method_of(recipe.method, backbone)
    method = method.to(device, torch.float64 if precision == torch.float64 else torch.float32)
    if fused and resolve_execution(recipe.training.execution, device) == "captured" and by_kernels(device):
        fuse(method)
    if recipe.training.recompute:
        recompute_blocks(method.backbone)
    return share_statistics(method.to(memory_format=torch.channels_last)).train()


def save(run: Run, step: int, method: Any, optimizer: Optimizer, output: StepOutput, monitor: Monitor) -> None:
    """A checkpoint and the backbone, from the main process; never of a network that has become NaN."""
    if distributed.is_main() and bool(output.loss.isfinite()):
        save_checkpoint(run.checkpoint_file, step, method, optimizer, monitor.seconds)
        save_backbone(method.backbone, run.backbone_file)
    distributed.barrier()


def _class_count(labels: torch.Tensor) -> int:
    return int(labels.max()) + 1 if labels.ndim == 1 else labels.shape[1]


def _announce(
    recipe: Recipe[Any],
    run: Run,
    source: Source,
    loader: Loader,
    plan: Plan,
    method: Any,
    device: torch.device,
    precision: torch.dtype,
    start: int,
) -> None:
    """What is about to happen, in a few lines."""
    if not distributed.is_main():
        return
    settings = recipe.training
    size = sum(parameter.numel() for parameter in method.backbone.parameters()) / 1e6
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    labels = (
        f"{len(source.classes) or _class_count(source.labels)} classes" if source.labels is not None else "no labels"
    )
    rule = f" ({recipe.optimizer.lr:g} x {settings.batch_size}/256)" if recipe.optimizer.scale_lr else ""
    lines = [
        f"{recipe.method.name} on {source.name}: {len(source):,} images ({labels}), {loader.storage}",
        f"{recipe.backbone.name}, {size:.2f} M parameters, {recipe.data.image_size} px; {where}, "
        f"{str(precision).removeprefix('torch.')}, {resolve_execution(settings.execution, device)} steps, "
        f"{distributed.world_size()} process(es)",
        f"{settings.epochs} epochs of {plan.steps_per_epoch} steps of {settings.batch_size} images; "
        f"{recipe.optimizer.name}, learning rate {plan.peak_lr:g}{rule}",
    ]
    without = sorted({name for policy in recipe.views for name in left_out(policy, recipe.backbone.channels)})
    if without:
        lines.append(
            f"images of {recipe.backbone.channels} channels: {' and '.join(without)} are left out of the views"
        )
    if start == plan.steps:
        lines = [f"{run.folder} is complete: nothing to train"]
    elif start:
        lines.append(f"continuing after step {start} of {plan.steps}")
    for line in lines:
        note(run.folder, line)
    if start == 0:
        say(f"writing to {run.folder}")
