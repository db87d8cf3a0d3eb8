"""The command line: each verb a thin call of a public function."""

import os
import sys

from tico_ssl.cli import classifying, computing, doctor, exporting, images, looking, lookup, planning
from tico_ssl.cli._app import app
from tico_ssl.runtime.errors import told
from tico_ssl.runtime.interrupts import answered
from tico_ssl.runtime.launcher import adopt_srun
from tico_ssl.runtime.printing import accept_all_text

__all__ = ["app", "main"]


def main() -> None:
    """Run a command; what a user can put right is one line on stderr and exit code 2, or 3 for a training that became
    NaN."""
    try:
        accept_all_text()
        adopt_srun()
        try:
            with answered(end=True):
                app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the command has begun: every command answers it itself
        sys.exit(130)
    except BrokenPipeError:  # `tico list | head`
        _silence()
        sys.exit(1)
    except Exception as error:
        code = told(error)
        _silence()
        sys.exit(code)


def _silence() -> None:
    """What could not be printed is not tried again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
