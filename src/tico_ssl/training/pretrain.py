"""Pretraining: from a recipe to a trained backbone in its run folder."""

from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from shlex import quote

import torch
from torch.optim import Optimizer

from tico_ssl.config.recipe import Recipe
from tico_ssl.config.sections import Execution, limits_of
from tico_ssl.config.views import shorter_side
from tico_ssl.data.bad_files import BadFiles, readable, survey
from tico_ssl.data.fingerprint import require_same_images
from tico_ssl.data.measuring import normalised, settled
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.data.store import store_for
from tico_ssl.methods._base import Method
from tico_ssl.methods._base import build_method as method_of
from tico_ssl.networks.backbones import SMALL_STEM, Backbone, build_backbone, coarse_stem, has_small_stem
from tico_ssl.networks.batch_norm import share_statistics
from tico_ssl.networks.fused import fuse
from tico_ssl.networks.recomputing import recompute_blocks
from tico_ssl.networks.storage import EARLY_SMALL_STEM, described_state, holds, save_backbone
from tico_ssl.optim.groups import build_optimizer
from tico_ssl.pipeline.loader import Loader, RawBatch
from tico_ssl.pipeline.sheet import COLUMNS, save_contact_sheet
from tico_ssl.pipeline.workers import chosen_workers
from tico_ssl.results.record import duration
from tico_ssl.results.run_folder import Run, create_run
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.device import resolve_precision
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed
from tico_ssl.training import loop
from tico_ssl.training.batch_file import save_batch
from tico_ssl.training.checkpoint import Position, restore, save_checkpoint
from tico_ssl.training.finite import Watch
from tico_ssl.training.initial import Start
from tico_ssl.training.loop import Course, Hooks
from tico_ssl.training.monitor import Monitor, measure, note
from tico_ssl.training.online_knn import OnlineKnn
from tico_ssl.training.plan import Plan
from tico_ssl.training.sharding import Whole, check_sharded
from tico_ssl.training.step import Outcome, Step, resolve_execution
from tico_ssl.training.stop import NotFinite, Stop, batch_file
from tico_ssl.views.executor import Views, by_kernels
from tico_ssl.views.table import left_out


def train(recipe: Recipe, run: Run, device: torch.device, overwrite: bool = False) -> None:
    """Pretrain by a recipe, and write everything to the run folder."""
    fallbacks.drain()  # of earlier work in this process
    recipe = recipe if overwrite else _with_the_stem_of(run, recipe)
    start = Start.of(recipe, run, overwrite)
    setup = prepare(recipe, device, start=start)
    longer = "" if overwrite else _longer(run, recipe)
    distributed.barrier()  # every process inspects the folder before the main one writes to it
    if distributed.is_main():
        create_run(run.folder, setup.recipe, overwrite)
    distributed.barrier()
    begin = restore(run.checkpoint_file, setup.method, setup.optimizer, device, partial(note, run.folder))
    if begin.step > 0 and distributed.is_main() and not holds(run.backbone_file, setup.method.backbone):
        note(run.folder, f"{run.backbone_file} is not that of the checkpoint: it is written again")
        save_backbone(setup.method.backbone, run.backbone_file)
    if begin.step == 0 and start is not None and distributed.is_main():
        save_backbone(setup.method.backbone, run.initial_file)
    _announce(setup, run, begin.step, [] if start is None else start.said, longer)
    if begin.step < setup.plan.steps:
        if distributed.is_main():
            require_same_images(setup.source, run.images_file)
        _train(setup, run, begin)


def _with_the_stem_of(run: Run, recipe: Recipe) -> Recipe:
    """A run that an earlier version began keeps the stem that it has, where the recipe leaves that to a rule."""
    found, between = None, SMALL_STEM < recipe.data.image_size <= EARLY_SMALL_STEM
    if recipe.backbone.stem == "auto" and between and run.backbone_file.is_file():
        with suppress(UserError):  # a damaged file, which the checkpoint replaces
            found = described_state(run.backbone_file)[1].config.stem
    if found in (None, "auto"):
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"stem": found})})


@dataclass(frozen=True)
class Learner:
    """What a recipe trains, on a device, before the first step: all but the images."""

    recipe: Recipe
    device: torch.device
    precision: torch.dtype
    views: Views
    plan: Plan
    method: Method
    optimizer: Optimizer


@dataclass(frozen=True)
class Setup(Learner):
    """Everything that a recipe defines, on a device, before the first step."""

    source: Source
    loader: Loader


def prepare(recipe: Recipe, device: torch.device, source: Source | None = None, start: Start | None = None) -> Setup:
    """Open the images, unless they are, and build the network and its optimiser."""
    settings, data = recipe.training, recipe.data
    if settings.parts > 1 and distributed.active():
        raise UserError("training.parts needs a single process: several processes split the batch already")
    bad, workers = BadFiles(), chosen_workers(settings.workers, "training.workers")
    channels, shorter, given = recipe.backbone.channels, shorter_side(recipe.views, data.image_size), source
    source = open_training(data, channels, shorter, tell=_later) if given is None else given
    data = settled(data, source, channels)
    recipe = recipe.model_copy(update={"data": data})
    note = partial(fallbacks.note, "store")
    store = store_for(source, data, channels, shorter, alone=not distributed.active(), note=note)
    source = source if store is None else store.stored()
    if given is None:
        survey(source, data.most_bad, bad, workers)
    views = build_views(recipe, device)
    loader = Loader(source, views, settings.batch_size, settings.seed, device, workers, bad, data.on_gpu, store)
    learner = build_learner(recipe, device, views, loader.steps_per_epoch, start)
    recipe.method.check_batch(settings.batch_size, settings.batch_size // (distributed.world_size() * settings.parts))
    learner.method.check_data(len(source), source.labels)
    if settings.sharded:
        check_sharded(recipe, learner.method)
    return Setup(**vars(learner), source=source, loader=loader)


def _later(line: str) -> None:
    """What is found in the images is told with the other settings of the run."""


def build_views(recipe: Recipe, device: torch.device) -> Views:
    """The views of a recipe."""
    data, precision = recipe.data, resolve_precision(recipe.training.precision, device)
    return Views(recipe.views, data.image_size, data.mean, data.std, precision)


def build_learner(
    recipe: Recipe, device: torch.device, views: Views, steps_per_epoch: int, start: Start | None = None
) -> Learner:
    """The network of a recipe with initial weights, its optimiser and its schedule."""
    precision = resolve_precision(recipe.training.precision, device)
    method, plan = build_method(recipe, device, precision, start=start), Plan.of(recipe, steps_per_epoch)
    optimizer = build_optimizer(method, recipe.optimizer, plan.peak_lr, method.fixed_rate())
    return Learner(recipe, device, precision, views, plan, method, optimizer)


def build_step(learner: Learner) -> Step:
    """The training step of a recipe."""
    settings = learner.recipe.training
    distributed.spread(learner.method)
    return Step(
        learner.method,
        learner.optimizer,
        learner.views,
        learner.precision,
        learner.device,
        settings.clip_gradient,
        execution_of(learner.recipe),
        settings.parts,
    )


def execution_of(recipe: Recipe) -> Execution:
    """The execution that a recipe asks for: the steps of a divided network are eager."""
    divided = recipe.training.sharded and distributed.active()
    return "eager" if divided else recipe.training.execution


def _train(setup: Setup, run: Run, begin: Position) -> None:
    """Carry out the remaining steps."""
    settings, plan = setup.recipe.training, setup.plan
    divided = settings.sharded and distributed.active()
    whole = Whole(setup.method, setup.optimizer) if divided else None
    step, watch = build_step(setup), Watch(setup.method, setup.optimizer, begin.step)
    knn = OnlineKnn.of(setup.recipe, setup.source, setup.device)
    with closing(step), Monitor(run, plan.steps, settings.batch_size, begin, settings.loggers) as monitor:
        moments = _Moments(setup, run, step, monitor, knn, watch, whole)
        course = Course(
            begin.step, plan.steps, settings.seed, go_on="; continue with --resume", timed=_timed(setup, begin.step)
        )
        loop.train(course, moments.batches(begin.step), moments.hooks(), monitor.clock, monitor.display)
        monitor.note(f"trained in {monitor.clock.seconds:,.0f} s")


def _timed(setup: Setup, start: int) -> list[int]:
    """When to look how fast training is: at its start, and in the second epoch if images are then decoded already."""
    second = setup.plan.steps_per_epoch
    return [start, second] if setup.loader.store is not None and start < second else [start]


@dataclass(frozen=True)
class _Moments:
    """The loop's callbacks in pretraining."""

    setup: Setup
    run: Run
    step: Step
    monitor: Monitor
    knn: OnlineKnn | None
    watch: Watch
    whole: Whole | None = None
    """In one piece, if the training is divided among processes."""

    def hooks(self) -> Hooks[RawBatch]:
        return Hooks(
            make_step=self.make_step,
            log_due=self.log_due,
            check=self.check,
            log=self.log,
            save_due=self.save_due,
            save=self.save,
            before_save=self.put_together,
            between=self.between,
            tell=self.tell,
            foretell=self.foretell,
        )

    def batches(self, start: int) -> Generator[RawBatch]:
        """Batches of all steps; a contact sheet is drawn of the first batch's views."""
        setup, sheet = self.setup, self.run.views_file
        for number, raw in enumerate(setup.loader.iterate(start, setup.plan.steps), start):
            if number == 0 and distributed.is_main():
                places = raw.index[:COLUMNS].tolist()
                originals = [readable(setup.source, place, setup.loader.bad) for place in places]
                views = setup.loader.views
                with self.monitor.recording("views.png"):
                    save_contact_sheet(sheet, originals, views.make(raw.pixels, raw.decisions), views)
                    self.monitor.show("views", sheet)
            yield raw

    def make_step(self, step: int, raw: RawBatch) -> Outcome:
        plan = self.setup.plan
        return self.step(raw, plan.lr(step), step / plan.steps)

    def log_due(self, done: int) -> bool:
        every = self.setup.recipe.training.log_every_steps
        return done % every == 0 or done % self.setup.plan.steps_per_epoch == 0

    def check(self, done: int, raw: RawBatch, outcome: Outcome) -> None:
        if not (faults := self.watch.faults(done, outcome.output)):
            return
        stop = Stop(
            noticed=done,
            finite=self.watch.good,
            saved=self.watch.saved,
            steps_per_epoch=self.setup.plan.steps_per_epoch,
            not_finite=faults,
        )
        kept = f"`tico replay {quote(str(self.run.folder))}` shows how"
        try:
            if distributed.is_main():
                stop.write(self.run)
                save_batch(batch_file(self.run), done - 1, raw, self.setup.views)
        except OSError as error:  # a full disk must not hide why training stops
            kept = f"its batch could not be saved ({error})"
        distributed.barrier()
        raise NotFinite(f"{stop.sentence()}; {kept}")

    def log(self, done: int, outcome: Outcome) -> None:
        setup, plan = self.setup, self.setup.plan
        rates = {"lr": plan.lr(done - 1)} | ({"fixed_lr": plan.peak_lr} if setup.method.fixed_rate() else {})
        values = measure(outcome.output, setup.method, outcome.extra | rates)
        waited = setup.loader.take_waited()
        self.monitor.log(done, plan.epoch(done), values, setup.method, done > plan.warmup, waited)

    def tell(self, done: int, reasons: dict[str, str]) -> None:
        self.monitor.tell(done, self.setup.plan.epoch(done), reasons, self.step.execution)

    def foretell(self, done: int, seconds: float) -> None:
        epochs, left = (
            self.setup.recipe.training.epochs,
            self.setup.recipe.training.epochs - self.setup.plan.epoch(done),
        )
        which = f"{epochs} epochs" if left > epochs - 1 else f"the remaining {left:.0f} of {epochs} epochs"
        self.monitor.note(f"about {duration(seconds)} for {which}, as fast as it is now")

    def between(self, done: int) -> None:
        setup, settings = self.setup, self.setup.recipe.training
        epoch, in_epoch = divmod(done, setup.plan.steps_per_epoch)
        if in_epoch:
            return
        if self.knn is not None and setup.plan.due(done, settings.knn_every_epochs):
            self.put_together(done)
            found = self.knn.measure((self.whole or setup).method.backbone)
            self.monitor.write({"step": done, "epoch": epoch, **found})
        bad, store = setup.loader.bad, setup.loader.store
        if epoch == 1 and store is not None and store.refused:
            fallbacks.note("store", f"there was no room for about {len(store.missing()):,} of {len(setup.source):,}")
        with self.monitor.recording("bad_files.jsonl"):
            bad.write(self.run.bad_files_file)
        self.monitor.epoch_ended(done, epoch, settings.epochs, len(bad))

    def save_due(self, done: int) -> bool:
        plan, settings, clock = self.setup.plan, self.setup.recipe.training, self.monitor.clock
        late = not clock.ever_saved or clock.since_saved > settings.checkpoint_seconds
        due = plan.due(done, settings.checkpoint_every_epochs) and distributed.anyone(late)
        return due or done == plan.steps

    def put_together(self, done: int) -> None:
        if self.whole is not None:
            self.whole.put_together()

    def save(self, done: int) -> None:
        """Last comes the checkpoint: when it is on the disk, so are its metrics and its backbone."""
        setup, seconds, keep = self.setup, self.monitor.clock.seconds, self.setup.recipe.training.keep_checkpoints
        if not self.run.recipe_file.is_file():  # somebody has removed the folder
            create_run(self.run.folder, setup.recipe, overwrite=False)
            lost = f"metrics up to step {done} are lost"
            self.monitor.note(f"warning: {self.run.folder} was gone and is written again: {lost}")
        self.monitor.flush()
        whole = self.whole or setup
        save_backbone(whole.method.backbone, self.run.backbone_file)
        save_checkpoint(self.run.checkpoint_file, done, whole.method, whole.optimizer, seconds, keep)
        self.watch.saved = done


def build_method(
    recipe: Recipe, device: torch.device, precision: torch.dtype, fused: bool = True, start: Start | None = None
) -> Method:
    """The method of a recipe with initial weights, on its device, in training mode. By default BatchNorm is fused where
    steps are captured."""
    torch.manual_seed(derived_seed(recipe.training.seed, "weights"))
    data = recipe.data
    limits = limits_of(data.range)
    backbone = build_backbone(recipe.backbone, data.image_size, data.mean, data.std, limits)
    if start is not None:
        start.load(backbone)
    method = method_of(recipe.method, backbone)
    method = method.to(device, torch.float64 if precision == torch.float64 else torch.float32)
    if fused and resolve_execution(execution_of(recipe), device) == "captured" and by_kernels(device):
        fuse(method)
    if recipe.training.recompute:
        recompute_blocks(method.backbone)
    return share_statistics(method.to(memory_format=torch.channels_last)).train()


def _stem(backbone: Backbone) -> str:
    """Which stem a ResNet has: that for small images keeps their resolution, and costs as much as images four times as
    wide and high."""
    return " with the stem for small images" if has_small_stem(backbone.network) else ""


def _class_count(labels: torch.Tensor) -> int:
    return int(labels.max()) + 1 if labels.ndim == 1 else labels.shape[1]


def _longer(run: Run, recipe: Recipe) -> str:
    """What it means that a run is resumed for more epochs than it had, if it is."""
    before = run.recipe().training.epochs if run.recipe_file.is_file() else recipe.training.epochs
    if before == recipe.training.epochs:
        return ""
    return f", {recipe.training.epochs} epochs instead of {before}: from here on with their learning rates and decays"


def _announce(setup: Setup, run: Run, start: int, initial: list[str], longer: str) -> None:
    """Log what is about to run, in a few lines."""
    if not distributed.is_main():
        return
    plan = setup.plan
    if start == plan.steps:
        lines = [f"{run.folder} is complete: nothing to train"]
    else:
        lines = _described(setup) + ([f"continuing after step {start} of {plan.steps}{longer}"] if start else initial)
    for line in lines:
        note(run.folder, line)
    if start == 0:
        say(f"writing to {run.folder}")


def _described(setup: Setup) -> list[str]:
    """Images, network, machine and schedule."""
    recipe, settings, source, device = setup.recipe, setup.recipe.training, setup.source, setup.device
    size = sum(parameter.numel() for parameter in setup.method.backbone.parameters()) / 1e6
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    labels = (
        f"{len(source.classes) or _class_count(source.labels)} classes" if source.labels is not None else "no labels"
    )
    rule = f" ({recipe.optimizer.lr:g} x {settings.batch_size}/256)" if recipe.optimizer.scale_lr else ""
    lines = [
        f"{recipe.method.name} on {source.name}: {len(source):,} images ({labels}), {setup.loader.storage}",
        f"{recipe.backbone.name}{_stem(setup.method.backbone)}, {size:.2f} M parameters, {recipe.data.image_size} px; "
        f"{where}, "
        f"{str(setup.precision).removeprefix('torch.')}, {resolve_execution(execution_of(recipe), device)} steps, "
        f"{distributed.world_size()} process(es)",
        f"{settings.epochs} epochs of {setup.plan.steps_per_epoch} steps of {settings.batch_size} images; "
        f"{recipe.optimizer.name}, learning rate {setup.plan.peak_lr:g}{rule}",
        *([setup.plan.shortened] if setup.plan.shortened else []),
        *([coarse] if (coarse := coarse_stem(setup.method.backbone.network, recipe.data.image_size)) else []),
    ]
    without = sorted({name for policy in recipe.views for name in left_out(policy, recipe.backbone.channels)})
    if source.scaling is not None:
        lines.append(source.scaling.line())
    if recipe.backbone.channels != 3:
        lines.append(normalised(recipe.data))
    if without:
        lines.append(
            f"images of {recipe.backbone.channels} channels: {' and '.join(without)} are left out of the views"
        )
    return lines
