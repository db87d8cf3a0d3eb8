"""Ask the process that talks to object stores, and start it when it is first needed.

There is one for a process and its forks, which ask it through connections of their own, one per thread. If it is gone,
or the environment has other credentials by now, another one is started.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import tico_ssl
from tico_ssl.data.remote.server import BAD, GOOD, READY
from tico_ssl.data.remote.urls import require_library
from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.errors import UserError

SETTINGS = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", cache_folder.VARIABLE)
TRIES = 3  # to ask
LONGEST_FOLDER = 70  # characters: those of a socket's path are few
Setting = tuple[tuple[str, str], ...]


class _Helper:
    """A process that talks to stores, and where it listens. It ends when nobody holds its input open any more."""

    def __init__(self, settings: Setting) -> None:
        self.settings = settings
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"
        self.address = str(Path(tempfile.mkdtemp(prefix="tico-", dir=short)) / "socket")  # in a folder of its user's
        packages = str(Path(tico_ssl.__file__).parents[1])
        path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tico_ssl.data.remote.server", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches this process only, which may need bytes to end well
        )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if said.readline() != READY:
                raise UserError("data in object storage: the process that reads them could not be started")

    def let_go(self) -> None:
        """Hold its input no longer. Forgetting this object is not enough: Python keeps processes that still run."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


_helper: _Helper | None = None
_starting = threading.Lock()
_mine = threading.local()


def ask(do: str, **about: Any) -> bytes:
    """The answer to a request. What cannot be had is a UserError."""
    request = json.dumps({"do": do, **about}).encode()
    for _ in range(TRIES):
        helper = _running()
        try:
            connection = _connection(helper)
            connection.send_bytes(request)
            return _content(connection.recv_bytes())
        except (EOFError, OSError):  # it was killed
            _forget(helper)
    raise UserError("data in object storage: the process that reads them was killed; is memory exhausted?")


def _content(answer: bytes) -> bytes:
    kind, content = answer[:1], answer[1:]
    if kind == BAD:
        raise UserError(content.decode(errors="surrogateescape"))
    if kind != GOOD:
        raise RuntimeError(content.decode())
    return content


def _connection(helper: _Helper) -> "Connection":
    """The connection of this thread of this process."""
    known = getattr(_mine, "known", None)
    if known is None or known[:2] != (os.getpid(), helper.address):
        _mine.known = known = (os.getpid(), helper.address, Client(helper.address))
    found: Connection = known[2]
    return found


def _running() -> _Helper:
    """The process for this environment, started if there is none."""
    global _helper
    settings = tuple(sorted(item for item in os.environ.items() if item[0].upper().startswith(SETTINGS)))
    with _starting:
        if _helper is None or _helper.settings != settings:
            require_library()
            if _helper is not None:
                _helper.let_go()
            _helper = _Helper(settings)
        return _helper


def _forget(helper: _Helper) -> None:
    """It is gone, and its folder is of no use to anyone."""
    global _helper
    _mine.known = None
    helper.let_go()
    shutil.rmtree(Path(helper.address).parent, ignore_errors=True)
    with _starting:
        if _helper is helper:
            _helper = None


def _after_fork() -> None:
    """A lock may have been held by a thread that a fork does not have."""
    global _starting
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
