"""A log of JSON lines that is cut back on resume, so that no step appears twice; and the check for a finite loss."""

import math
from pathlib import Path
from typing import Any

import torch

from tico_ssl.methods._base import StepOutput
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.files import sync
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines, write_json_lines
from tico_ssl.runtime.progress import say
from tico_ssl.training.stop import NotFinite


class Journal:
    """A file of JSON lines with a `step`, cut back to the step at which training continues; the main process writes.

    `kept` are the lines up to that step, in every process. Lines that cannot be written are kept in memory and tried
    again with the next one.
    """

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.kept = [line for line in read_json_lines(file) if _step_of(line) <= start]
        self._unwritten: list[dict[str, Any]] = []
        distributed.barrier()  # all processes read before one writes
        if not distributed.is_main():
            return
        file.parent.mkdir(parents=True, exist_ok=True)  # not later: if it is gone, it may have become another's
        if file.is_file():
            write_json_lines(file, self.kept)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        if not distributed.is_main():
            return
        self._unwritten.append(line)
        try:
            self._write()
        except OSError as error:
            if len(self._unwritten) == 1:  # the first of them
                say(f"warning: {self.file} cannot be written: {refusal(error)}; its lines are kept until it can")

    def flush(self) -> None:
        """Wait until all lines are on the disk; an OSError if they cannot be written."""
        self._write()
        if self.file.is_file():
            sync(self.file)

    def _write(self) -> None:
        while self._unwritten:
            append_json_line(self.file, self._unwritten[0])
            del self._unwritten[0]


def _step_of(line: dict[str, Any]) -> float:
    """The step of a line; that of a damaged one is never reached."""
    step = line.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else math.inf


def mean_values(output: StepOutput) -> dict[str, float]:
    """The loss of a step and its terms, averaged over processes. Synchronises with the device."""
    tensors = [output.loss, *output.terms.values()]
    means = distributed.all_mean(torch.stack([tensor.detach().float() for tensor in tensors]))
    return dict(zip(["loss", *output.terms], means.tolist()))


def check_finite(loss: float, step: int, advice: str, name: str = "") -> None:
    """Stop a training whose loss is not finite, with advice."""
    if not math.isfinite(loss):
        who = f"{name}: " if name else ""
        raise NotFinite(f"{who}the loss became {loss} at or before step {step}: {advice}")
