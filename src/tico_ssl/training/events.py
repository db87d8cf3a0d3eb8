"""TensorBoard's events of a training, as long as they can be written."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tico_ssl.runtime.errors import refusal
from tico_ssl.runtime.progress import say


class Events:
    """Numbers and images for TensorBoard. If they cannot be written they end, with a warning: metrics.jsonl has the
    same numbers."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported when it is needed

        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=start)
        self._start = start
        self._hook, threading.excepthook = threading.excepthook, self._excepthook

    def add(self, record: dict[str, Any]) -> None:
        """The numbers of a step."""
        try:
            for name, value in record.items():
                if self._writer is not None and name not in ("step", "epoch"):
                    self._writer.add_scalar(name, value, record["step"])
        except OSError as error:
            self._end(error)

    def show(self, name: str, picture: Path) -> None:
        """An image."""
        try:
            with Image.open(picture) as opened:
                if self._writer is not None:
                    self._writer.add_image(name, np.asarray(opened.convert("RGB")), self._start, dataformats="HWC")
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Write what is left."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._end(error)
        threading.excepthook = self._hook

    def _end(self, error: OSError) -> None:
        self._writer = None
        say(f"warning: TensorBoard's events end here: {refusal(error)}")

    def _excepthook(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread gives its error to the next call as well: nobody needs its traceback."""
        if not (issubclass(args.exc_type, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            self._hook(args)
