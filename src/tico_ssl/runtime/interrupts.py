"""Ctrl-C while a long computation does not let Python answer.

Python calls a signal's handler between two of its own operations, and on a CPU one of them may take a minute: a
backward pass, say. A thread hears of the signal at once, says what happens, and ends the process if it is asked again.
Files are written whole or not at all, so what was saved before is there, however the process ends.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tico_ssl.runtime.progress import console, say

PATIENCE = 0.5  # seconds in which most commands have ended by themselves
CODE = 128 + signal.SIGINT
SHOW_CURSOR = b"\x1b[?25h"  # which progress bars hide


@contextmanager
def answered(end: bool = False) -> Iterator[None]:
    """Within, a request to stop (Ctrl-C, SIGTERM) that takes a while is answered with a line; with `end`, a second
    Ctrl-C ends the process. Nothing happens in another thread, or where others listen to signals in this way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        heard.close()
        told.close()
        yield
        return
    over = threading.Event()
    listener = threading.Thread(target=_listen, args=(heard, over, end), name="interrupts", daemon=True)
    listener.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(-1)
        told.close()
        listener.join()
        heard.close()


def _listen(heard: socket.socket, over: threading.Event, end: bool) -> None:
    """Until the other end is closed, take in the numbers of signals."""
    asked, said = 0, False
    while number := heard.recv(1):
        if number[0] not in (signal.SIGINT, signal.SIGTERM):
            continue
        asked += number[0] == signal.SIGINT
        if over.wait(PATIENCE):
            return
        if end and asked > 1:
            _end()
        if not said:
            say("stopping after this step" + ("; Ctrl-C again stops at once" if end else ""))
        said = True


def _end() -> None:
    """End the process, whatever it is doing. Its workers notice."""
    if console.is_terminal:
        os.write(1, SHOW_CURSOR + b"\n")
    os._exit(CODE)
