"""Start or resume a run. User errors are raised before torch is imported."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tico_ssl.config.recipe import load_recipe
from tico_ssl.data.given import Given, as_source, require_data
from tico_ssl.results.run_folder import Run, admit
from tico_ssl.runtime.errors import UserError, memory_advice
from tico_ssl.runtime.launcher import launched_rank
from tico_ssl.runtime.locks import alone_in
from tico_ssl.runtime.progress import say

ADVICE = (
    "lower training.batch_size (--find-batch finds the largest that fits), raise training.parts, "
    "or set training.recompute=true"
)


def pretrain(
    recipe: str | Path | Mapping[str, Any] = "demo",
    data: Given | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Pretrain a backbone by a recipe. `resume` continues an existing run, or starts a new one."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    named = {} if data is None else {"data.source": as_source(data)}
    loaded = load_recipe(recipe, {**(overrides or {}), **named}, say)
    require_data(loaded.data.source)
    run = Run(Path(out).expanduser() if out is not None else default_folder(recipe))
    admit(run.folder, loaded, resume, overwrite)
    with _alone(run.folder):
        admit(run.folder, loaded, resume, overwrite)  # again: another command may have ended since

        from tico_ssl.runtime import distributed
        from tico_ssl.runtime.device import choose_device, tune_process
        from tico_ssl.training.pretrain import train

        device = choose_device()
        tune_process(device)
        with distributed.session(device), memory_advice(ADVICE):
            train(loaded, run, device, overwrite)
    return run


def _alone(folder: Path) -> AbstractContextManager[None]:
    """Keep other commands out of the folder; of several processes of this one, the first does."""
    if launched_rank() > 0:
        return nullcontext()
    return alone_in(folder, f"{folder} is in use by another command: wait for its end, or choose another --out")


def default_folder(recipe: str | Path | Mapping[str, Any]) -> Path:
    """runs/ plus the recipe's name."""
    if isinstance(recipe, Mapping):
        return Path("runs") / "run"
    is_file = Path(recipe).suffix in (".yaml", ".yml")
    return Path("runs") / (Path(recipe).stem if is_file else str(recipe).replace("/", "-"))
