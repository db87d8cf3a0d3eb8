"""Pretraining: from a recipe to a trained backbone in its run folder."""

from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from shlex import quote

import torch

from tico_ssl.config.few_images import difference
from tico_ssl.config.recipe import Recipe
from tico_ssl.data.bad_files import readable
from tico_ssl.data.fingerprint import require_same_images
from tico_ssl.networks.stems import SMALL_STEM
from tico_ssl.networks.storage import EARLY_SMALL_STEM, described_state, holds, save_backbone
from tico_ssl.pipeline.loader import RawBatch
from tico_ssl.pipeline.sheet import COLUMNS, save_contact_sheet
from tico_ssl.results.record import duration
from tico_ssl.results.run_folder import Run, create_run
from tico_ssl.runtime import distributed, fallbacks
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.locks import LOCK, InUse, Lock
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted
from tico_ssl.training import loop
from tico_ssl.training.batch_file import save_batch
from tico_ssl.training.checkpoint import Position, restore, save_checkpoint
from tico_ssl.training.finite import Watch
from tico_ssl.training.header import described
from tico_ssl.training.initial import Start
from tico_ssl.training.loop import Course, Hooks
from tico_ssl.training.monitor import Monitor, measure, note
from tico_ssl.training.online_knn import OnlineKnn
from tico_ssl.training.setup import Setup, build_step, prepare
from tico_ssl.training.sharding import Whole, is_divided
from tico_ssl.training.step import Outcome, Step
from tico_ssl.training.stop import NotFinite, Stop, batch_file


def train(recipe: Recipe, run: Run, device: torch.device, overwrite: bool = False, lock: Lock | None = None) -> None:
    """Pretrain by a recipe, and write everything to the run folder, whose lock the main process has."""
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
    few = difference(recipe, setup.recipe)
    said = ([few] if few else []) + ([] if start is None else start.said)
    _announce(setup, run, begin.step, said, longer)
    if begin.step < setup.plan.steps:
        if distributed.is_main():
            require_same_images(setup.source, run.images_file)
        _train(setup, run, begin, lock)


def _with_the_stem_of(run: Run, recipe: Recipe) -> Recipe:
    """A run that an earlier version began keeps the stem that it has, where the recipe leaves that to a rule."""
    found, between = None, SMALL_STEM < recipe.data.image_size <= EARLY_SMALL_STEM
    if recipe.backbone.stem == "auto" and between and run.backbone_file.is_file():
        with suppress(UserError):  # a damaged file, which the checkpoint replaces
            found = described_state(run.backbone_file)[1].config.stem
    if found in (None, "auto"):
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"stem": found})})


def _train(setup: Setup, run: Run, begin: Position, lock: Lock | None) -> None:
    """Carry out the remaining steps."""
    settings, plan = setup.recipe.training, setup.plan
    whole = Whole(setup.method, setup.optimizer) if is_divided(setup.recipe) else None
    step, watch = build_step(setup), Watch(setup.method, setup.optimizer, begin.step)
    knn = OnlineKnn.of(setup.recipe, setup.source, setup.device)
    with closing(step), Monitor(run, plan.steps, settings.batch_size, begin, settings.loggers) as monitor:
        moments = _Moments(setup, run, step, monitor, knn, watch, whole, lock)
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
    lock: Lock | None = None
    """Of the run folder."""

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

    def stay(self, done: int) -> None:
        """Before anything is written: if the folder is gone, it is made and locked again, unless another run has begun
        in its place."""
        folder, lock = self.run.folder, self.lock
        if not distributed.is_main():
            return
        if lock is not None and lock.is_lost():
            replaced = (folder / LOCK).exists() and self.run.recipe_file.is_file()
            try:
                if not replaced:
                    lock.take()
            except InUse:
                replaced = True
            if replaced:
                raise UserError(
                    f"{folder} was moved or removed, and another run has begun in its place: this one ends at step "
                    f"{done}; what it saved is in the folder that was moved"
                )
        if not self.run.recipe_file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            require_same_images(self.setup.source, self.run.images_file)
            create_run(folder, self.setup.recipe, overwrite=False)
            self.monitor.note(
                f"warning: {folder} was gone and is written again, without its metrics from before step {done}"
            )

    def before_lines(self, done: int) -> None:
        """The same, before lines that are kept if they cannot be written."""
        with self.monitor.recording(str(self.run.folder)):
            self.stay(done)

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
            self.stay(done)
            if distributed.is_main():
                stop.write(self.run)
                save_batch(batch_file(self.run), done - 1, raw, self.setup.views)
        except (OSError, UserError) as error:  # neither a full disk nor a lost folder may hide why training stops
            kept = f"its batch could not be saved ({error})"
        distributed.barrier()
        raise NotFinite(f"{stop.sentence()}; {kept}")

    def log(self, done: int, outcome: Outcome) -> None:
        self.before_lines(done)
        setup, plan = self.setup, self.setup.plan
        rates = {"lr": plan.lr(done - 1)} | ({"fixed_lr": plan.peak_lr} if setup.method.fixed_rate() else {})
        values = measure(outcome.output, setup.method, outcome.extra | rates)
        waited = setup.loader.take_waited()
        self.monitor.log(done, plan.epoch(done), values, setup.method, done > plan.warmup, waited)

    def tell(self, done: int, reasons: dict[str, str]) -> None:
        self.before_lines(done)
        self.monitor.tell(done, self.setup.plan.epoch(done), reasons, self.step.execution)

    def foretell(self, done: int, seconds: float) -> None:
        epochs = self.setup.recipe.training.epochs
        left = epochs - self.setup.plan.epoch(done)
        which = (
            counted(epochs, "epoch") if left > epochs - 1 else f"the remaining {left:.0f} of {counted(epochs, 'epoch')}"
        )
        self.monitor.note(f"about {duration(seconds)} for {which} at the present speed")

    def between(self, done: int) -> None:
        setup, settings = self.setup, self.setup.recipe.training
        epoch, in_epoch = divmod(done, setup.plan.steps_per_epoch)
        if in_epoch:
            return
        if self.knn is not None and setup.plan.due(done, settings.knn_every_epochs):
            self.put_together(done)
            found = self.knn.measure((self.whole or setup).method.backbone)
            self.before_lines(done)  # that took long
            self.monitor.write({"step": done, "epoch": epoch, **found, "test_images": len(self.knn.queries)})
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
        self.stay(done)
        self.monitor.flush()
        whole = self.whole or setup
        save_backbone(whole.method.backbone, self.run.backbone_file)
        save_checkpoint(self.run.checkpoint_file, done, whole.method, whole.optimizer, seconds, keep)
        self.watch.saved = done


def _longer(run: Run, recipe: Recipe) -> str:
    """What it means that a run is resumed for more epochs than it had, if it is."""
    before = run.recipe().training.epochs if run.recipe_file.is_file() else recipe.training.epochs
    if before == recipe.training.epochs:
        return ""
    epochs = counted(recipe.training.epochs, "epoch")
    return f", {epochs} instead of {before}: from here on with their learning rates and decays"


def _announce(setup: Setup, run: Run, start: int, initial: list[str], longer: str) -> None:
    """Log what is about to run, in a few lines."""
    if not distributed.is_main():
        return
    plan = setup.plan
    if start == plan.steps:
        lines = [f"{run.folder} is complete: nothing to train"]
    else:
        lines = described(setup) + ([f"continuing after step {start} of {plan.steps}{longer}"] if start else initial)
    for line in lines:
        note(run.folder, line)
    if start == 0:
        say(f"writing to {run.folder}")
