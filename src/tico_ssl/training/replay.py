"""The step that made the first value that is not finite: found, saved and explained.

Everything in a run is a function of seed and step, so the steps since the last good checkpoint can be carried out
again, eagerly, and the state looked at after each. The batch of the first bad step, its views and the state before it
are kept in RUN/nan; with them the step can be carried out at any time, without the images.
"""

import copy
import time
from contextlib import closing
from shlex import quote

import torch

from tico_ssl.config.recipe import Recipe
from tico_ssl.optim.groups import load_optimizer
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.progress import bar
from tico_ssl.training.batch_file import load_batch, save_batch
from tico_ssl.training.checkpoint import restore, save_checkpoint
from tico_ssl.training.diagnosis import Explanation, diagnose
from tico_ssl.training.finite import Watch
from tico_ssl.training.initial import Start
from tico_ssl.training.loop import seed_network
from tico_ssl.training.setup import build_learner, build_step, build_views, prepare
from tico_ssl.training.stop import Stop, batch_file, read_stop, state_file


def explain(run: Run, device: torch.device, seconds: float | None = None) -> Explanation:
    """Carry out the first bad step of a run again, and say what made it. It is searched for if it is not known yet, for
    at most some seconds."""
    training = run.recipe().training.model_copy(update={"execution": "eager"})  # which can be looked into
    recipe = run.recipe().model_copy(update={"training": training})
    stop = read_stop(run)
    if stop.step is None or not (state_file(run).is_file() and batch_file(run).is_file()):
        begin, done, step = _search(recipe, run, stop, device, seconds)
        if step is None:
            return _in_vain(run, stop, begin, done)
        stop = stop.model_copy(update={"step": step})
        stop.write(run)
    assert stop.step is not None
    learner = build_learner(recipe, device, build_views(recipe, device), stop.steps_per_epoch)
    restore(state_file(run), learner.method, learner.optimizer, device)
    lr, progress = learner.plan.lr(stop.step), stop.step / learner.plan.steps
    seed_network(recipe.training.seed, stop.step)
    diagnosis = diagnose(build_step(learner), load_batch(batch_file(run), device), lr, progress)
    return diagnosis.explained(stop.step, lr)


def _search(
    recipe: Recipe, run: Run, stop: Stop, device: torch.device, seconds: float | None
) -> tuple[int, int, int | None]:
    """Carry out the steps since the last checkpoint until something is not finite, and save the batch of that step and
    the state before it. Returns the numbers of completed steps at the beginning and the end, and the step, if found."""
    until = None if seconds is None else time.monotonic() + seconds
    setup = prepare(recipe, device, start=Start.of(recipe, run))
    method, optimizer = setup.method, setup.optimizer
    begin = restore(run.checkpoint_file, method, optimizer, device).step
    if begin >= stop.noticed:
        raise UserError(f"{run.folder}: nothing to replay: training has gone on to step {begin} since it stopped")
    step, watch, batches = build_step(setup), Watch(method, optimizer, begin), setup.loader.iterate(begin, stop.noticed)
    with closing(batches), bar() as display:
        task = display.add_task("looking for the first bad step", total=stop.noticed - begin)
        for number, raw in enumerate(batches, begin):
            before = copy.deepcopy((method.state_dict(), optimizer.state_dict()))
            seed_network(recipe.training.seed, number)
            outcome = step(raw, setup.plan.lr(number), number / setup.plan.steps)
            display.advance(task)
            if watch.faults(number + 1, outcome.output):
                method.load_state_dict(before[0])
                load_optimizer(optimizer, before[1])
                save_checkpoint(state_file(run), number, method, optimizer, 0.0)
                save_batch(batch_file(run), number, raw, setup.views)
                return begin, number + 1, number
            if until is not None and time.monotonic() > until:
                break
    return begin, watch.good, None


def _in_vain(run: Run, stop: Stop, begin: int, done: int) -> Explanation:
    """What it means that no step was bad."""
    if done < stop.noticed:
        more = f"`tico replay {quote(str(run.folder))}` also looks at the later ones"
        summary = f"steps {begin + 1} to {done} are finite; {more}"
        return Explanation(summary, [summary])
    finite = f"steps {begin + 1} to {done}, carried out again one by one, are all finite"
    cause = "not the recipe, but how its steps were executed (captured on a GPU), or a fault of the machine"
    remedy = "--resume; if it happens again, training.execution=eager in a new run"
    return Explanation(
        f"{finite}; likely cause: {cause}; try: {remedy}", [finite, f"likely cause: {cause}", f"try: {remedy}"]
    )
