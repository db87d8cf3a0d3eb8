"""A training that stopped because a value was not finite: the error, and its record in the run folder, without torch.

RUN/nan has stop.json (this record) and batch.safetensors (a batch and its views); and, once the step that made the
first such value is known, state.pt (the training state before that step). With these `tico replay` needs no images.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tico_ssl.config.section import Section, validate
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically

NAMED = 3  # of the tensors that are not finite, in a message
USUAL_REMEDY = "lower optimizer.lr, lengthen optimizer.warmup_epochs or set training.clip_gradient"


class NotFinite(UserError):
    """The loss or the state of a training is NaN or infinite."""

    exit_code = 3


class Stop(Section):
    """After step `noticed` something was not finite, after step `finite` everything was; the last checkpoint is that
    after step `saved`. These are numbers of completed steps. `step` counts from 0: the one that made the first value
    that is not finite, once it is known."""

    noticed: Annotated[int, Field(ge=1)]
    finite: Annotated[int, Field(ge=0)]
    saved: Annotated[int, Field(ge=0)]
    steps_per_epoch: Annotated[int, Field(ge=1)]
    not_finite: list[str]
    step: Annotated[int, Field(ge=0)] | None = None

    def sentence(self) -> str:
        """What was noticed and when, and what is left."""
        verb = "is" if len(self.not_finite) == 1 else "are"
        left = (
            f"the last good checkpoint is that of step {self.saved}" if self.saved else "no checkpoint was written yet"
        )
        when = f"after step {self.finite} all was" if self.finite else "before the first step all was"
        return f"stopped: after step {self.noticed} {listed(self.not_finite)} {verb} not finite ({when}); {left}"

    def write(self, run: Run) -> None:
        """Write the record into the run folder."""
        folder(run).mkdir(exist_ok=True)
        write_atomically(folder(run) / "stop.json", self.model_dump_json(indent=2) + "\n")


def read_stop(run: Run) -> Stop:
    """The record of a run that stopped."""
    file = folder(run) / "stop.json"
    if not file.is_file():
        raise UserError(f"{run.folder}: nothing to replay: its training did not stop at NaN (there is no {file})")
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({error})") from error
    return validate(Stop, values, f"{file}: damaged")


def listed(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def folder(run: Run) -> Path:
    """Where a stop is recorded."""
    return run.folder / "nan"


def batch_file(run: Run) -> Path:
    """A batch and its views: of step `Stop.step` if it is known, else of the step at which the stop was noticed."""
    return folder(run) / "batch.safetensors"


def state_file(run: Run) -> Path:
    """The training state before step `Stop.step`."""
    return folder(run) / "state.pt"
