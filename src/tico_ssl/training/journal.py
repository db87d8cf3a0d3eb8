"""A log of JSON lines that is cut back on resume, so that no step appears twice; and the check for a finite loss."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from tico_ssl.methods._base import StepOutput
from tico_ssl.runtime import distributed
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.json_lines import append_json_line, read_json_lines
from tico_ssl.training.stop import NotFinite


class Journal:
    """A file of JSON lines with a `step`, cut back to the step at which training continues; the main process writes.

    `kept` are the lines up to that step, in every process.
    """

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.kept = [line for line in read_json_lines(file) if line["step"] <= start]
        distributed.barrier()  # all processes read before one writes
        if distributed.is_main() and file.is_file():
            write_atomically(file, "".join(json.dumps(line) + "\n" for line in self.kept))

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        if distributed.is_main():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self.file, line)


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
