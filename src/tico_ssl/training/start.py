"""Start or resume a run, replay the step at which one stopped, or find its largest batch. User errors are raised before
torch is imported."""

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tico_ssl.config.initial import require_initial
from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.data.given import Given, as_source, require_data
from tico_ssl.results.run_folder import Run, admit, as_begun, open_run
from tico_ssl.runtime.errors import UserError, memory_advice
from tico_ssl.runtime.interrupts import answered
from tico_ssl.runtime.launcher import launched, launched_rank, restarts
from tico_ssl.runtime.locks import Lock, alone_in
from tico_ssl.runtime.progress import say
from tico_ssl.training.logger import require_loggers
from tico_ssl.training.stop import USUAL_REMEDY, NotFinite, read_stop

if TYPE_CHECKING:
    import torch

ADVICE = (
    "lower training.batch_size (`tico pretrain --find-batch` finds the largest that fits) or data.image_size, "
    "raise training.parts, or set training.recompute=true"
)
EXPLAIN_SECONDS = 60.0  # that a stopped training spends on finding the step that made it stop


def pretrain(
    recipe: str | Path | Mapping[str, Any] = "demo",
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    init: str | Path | None = None,
) -> Run:
    """Pretrain a backbone by a recipe, and return its run: `folder`, `backbone_file`, `metrics()`.

    `recipe` is a packaged name, a YAML file or a mapping. `data` are the images: what `--data` takes, a torch data set,
    or a list of pairs of an image and a label; by default the recipe's. `out` is the run folder, by default runs/ and
    the recipe's name. `overrides` maps dotted names of settings to values. An existing run is an error, unless `resume`
    continues it (or starts one) or `overwrite` replaces it. `init` are the weights that the backbone starts from, as in
    `--init`; by default they are random.

        run = pretrain("photos", data="photos/", out="runs/mine", overrides={"training.epochs": 100})
        backbone = load_backbone(run.folder)
    """
    loaded, run = checked(recipe, data, out, overrides, resume, overwrite, init)
    with _alone(run.folder) as lock, answered():
        admit(run.folder, loaded, resume, overwrite)  # again: another command may have ended since
        loaded = as_begun(run, loaded) if resume else loaded

        from tico_ssl.runtime.device import choose_device, tune_process
        from tico_ssl.runtime.process_group import process_group
        from tico_ssl.training.pretrain import train

        device = choose_device()
        tune_process(device)
        stopped: NotFinite | None = None
        try:
            with process_group(device), memory_advice(ADVICE):
                train(loaded, run, device, overwrite, lock)
        except NotFinite as error:
            stopped = error.with_traceback(None)  # its frames hold the network and the memory of its step
        if stopped is not None:
            raise NotFinite(f"{stopped}; {_explained(run, device)}")
    return run


def checked(
    recipe: str | Path | Mapping[str, Any] = "demo",
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    init: str | Path | None = None,
) -> tuple[Recipe, Run]:
    """The recipe and the folder of a run that may begin or go on; refuses one that may not. Nothing is written."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    if overwrite and restarts():
        raise UserError(
            "--overwrite would begin again whenever torchrun restarts: remove the folder yourself, and give --resume"
        )
    loaded = _loaded(recipe, data, overrides if init is None else {**(overrides or {}), "training.init": str(init)})
    require_loggers(loaded.training.loggers)
    run = Run(Path(out).expanduser() if out is not None else default_folder(recipe))
    admit(run.folder, loaded, resume, overwrite)
    if loaded.training.init is not None and not (resume and run.initial_file.is_file()):
        require_initial(loaded.training.init)
    return loaded, run


def _alone(folder: Path) -> AbstractContextManager[Lock | None]:
    """Keep other commands out of the folder; of several processes of this one, the first does."""
    if launched_rank() > 0:
        return nullcontext()
    return alone_in(folder, f"{folder} is in use by another command: wait for its end, or choose another --out")


def replay(folder: str | Path) -> list[str]:
    """Carry out again the step that made the training of a run stop at NaN: what made it, in words."""
    run = open_run(folder)
    read_stop(run)

    from tico_ssl.runtime.device import choose_device, tune_process
    from tico_ssl.training.replay import explain

    device = choose_device()
    tune_process(device)
    with _alone(run.folder), memory_advice(ADVICE):
        return explain(run, device).lines


def find_batch(
    recipe: str | Path | Mapping[str, Any] = "demo",
    data: Given | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[str]:
    """Find the largest batch of which a training step fits on the GPU: the result in words."""
    loaded = _loaded(recipe, data, overrides)
    if launched():
        raise UserError(
            "`tico pretrain --find-batch` needs a single process; the batch of several is that many times as large"
        )

    from tico_ssl.runtime.device import choose_device
    from tico_ssl.training.find_batch import largest_batch

    return largest_batch(loaded, choose_device())


def default_folder(recipe: str | Path | Mapping[str, Any]) -> Path:
    """runs/ plus the recipe's name."""
    if isinstance(recipe, Mapping):
        return Path("runs") / "run"
    is_file = Path(recipe).suffix in (".yaml", ".yml")
    return Path("runs") / (Path(recipe).stem if is_file else str(recipe).replace("/", "-"))


def _loaded(recipe: str | Path | Mapping[str, Any], data: Given | None, overrides: Mapping[str, Any] | None) -> Recipe:
    """The recipe with overrides and data, which must exist."""
    named = {} if data is None else {"data.source": as_source(data)}
    loaded = load_recipe(recipe, {**(overrides or {}), **named}, say)
    require_data(loaded.data.source)
    return loaded


def _explained(run: Run, device: "torch.device") -> str:
    """What made a training stop, as far as a minute suffices to find out; more of it is written to train.log. With
    several processes only what usually helps: their launcher ends them all as soon as one has ended."""
    from tico_ssl.training.monitor import note
    from tico_ssl.training.replay import explain

    if launched():
        return USUAL_REMEDY
    gc.collect()  # a captured step is a reference cycle, which keeps its GPU memory until collected
    try:
        explanation = explain(run, device, EXPLAIN_SECONDS)
    except (Exception, KeyboardInterrupt):  # nothing that goes wrong here may hide why training stopped
        return USUAL_REMEDY
    for line in explanation.lines:
        note(run.folder, line)
    return explanation.summary
