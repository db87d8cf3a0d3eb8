"""TensorBoard's events of a training, as long as they can be written."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tico_ssl.data.opening import open_picture
from tico_ssl.training.logger import Ending, Logger


class Events(Logger):
    """Numbers and images for TensorBoard, in the run folder."""

    title = "TensorBoard's events"

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported when it is needed

        self._writer = SummaryWriter(str(self.run.folder), purge_step=self.start + 1 if self.start else 0)
        self._hook, threading.excepthook = threading.excepthook, self._excepthook

    def _add(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "epoch":
                self._writer.add_scalar(name, value, step)

    def _show(self, name: str, picture: Path) -> None:
        with open_picture(picture) as opened:
            self._writer.add_image(name, np.asarray(opened.convert("RGB")), self.start, dataformats="HWC")

    def close(self, ending: Ending) -> None:
        """Also after a failure, TensorBoard's thread ends, and threads have the hook of before."""
        super().close(ending)
        if hasattr(self, "_hook"):
            with suppress(Exception):  # what failed before fails again
                self._writer.close()
            threading.excepthook = self._hook

    def _close(self, ending: Ending) -> None:
        self._writer.close()

    def _excepthook(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread gives its error to the next call as well: nobody needs its traceback."""
        if not (issubclass(args.exc_type, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            self._hook(args)
