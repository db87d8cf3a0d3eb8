"""One task of a study in its own process: `python -m tico_ssl.studies.worker {time|run} FOLDER NAME`."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO

from tico_ssl.config.study import Study, expand, jobs, load_study
from tico_ssl.evaluations._context import open_context
from tico_ssl.evaluations._single import evaluate_with
from tico_ssl.results.run_folder import Run
from tico_ssl.results.study_state import last_epoch, study_file, unevaluated
from tico_ssl.runtime.errors import Interrupted, UserError, told
from tico_ssl.runtime.printing import accept_all_text
from tico_ssl.studies.cost import epochs_for, read_costs, write_cost
from tico_ssl.studies.timing import measure
from tico_ssl.training.start import pretrain


def time_variant(folder: Path, name: str) -> None:
    """Measure the cost of a variant."""
    study = load_study(study_file(folder))
    (variant,) = [variant for variant in expand(study) if variant.name == name]
    with (folder / "costs" / "lock").open("w") as alone:
        lock(alone)
        write_cost(folder, variant, measure(variant.load()))


def make_run(folder: Path, name: str) -> None:
    """Train and evaluate a run, as far as that is not done yet."""
    study = load_study(study_file(folder))
    (job,) = jobs(study, [name])
    costs = read_costs(folder, expand(study))
    epochs = epochs_for(study.budget, job.variant, costs)
    run = pretrain(
        job.variant.recipe, out=folder / name, overrides=job.variant.with_seed(job.seed, epochs), resume=True
    )
    trained, wanted = last_epoch(run), run.recipe().training.epochs
    if trained < wanted:  # without metrics a run has no row in the table
        raise UserError(
            f"{run.metrics_file}: ends at epoch {trained:g} of {wanted}, though the run is trained; "
            f"remove {run.folder} to make it again"
        )
    evaluate(study, run)


def evaluate(study: Study, run: Run) -> None:
    """Evaluate by the protocols without results; features are extracted once."""
    protocols = unevaluated(study, run)
    if not protocols:
        return
    context = open_context(run.folder)
    for protocol in protocols:
        evaluate_with(context, run.folder, protocol, study.protocols[protocol])


def follow_parent() -> None:
    """If the study is killed, its runs stop with a checkpoint."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def wait_for_predecessor() -> None:
    """A run left behind by a killed study may still be writing its checkpoint: it locks the log file, which is this
    process's output, until it ends."""
    lock(sys.stdout)


def lock(file: IO[str]) -> None:
    """Wait for the lock of a file, where the system has such locks, and hold it until the file is closed."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX)


def main() -> None:
    """Do one task; an error is the last line of the output."""
    task, folder, name = sys.argv[1:]
    accept_all_text()
    follow_parent()
    wait_for_predecessor()
    try:
        {"time": time_variant, "run": make_run}[task](Path(folder), name)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        sys.exit(told(error))


if __name__ == "__main__":
    main()
