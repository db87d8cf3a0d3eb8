"""The process of a command that talks to object stores, for all its processes: `python -m tico_ssl.data.remote.server`.

It listens at a socket that only its user can reach, answers every connection in a thread, and ends with the process
that started it, and that one's forks: then its standard input is at its end. Bytes that are asked for are fetched by
blocks if there is room to keep these, several at once, and each by one request however many ask for it.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tico_ssl.data.remote import blocks, stores
from tico_ssl.data.remote.stores import Known
from tico_ssl.data.remote.urls import parent
from tico_ssl.runtime.errors import UserError

AT_ONCE = 32  # requests
READY = b"ready\n"
GOOD, BAD, BUG = b"+", b"-", b"!"  # how an answer begins


class Fetcher:
    """Bytes of objects, from blocks or from stores."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._lock = threading.Lock()
        self._coming: dict[str, Future[bytes]] = {}

    def answer(self, request: dict[str, Any]) -> bytes:
        """What a request asks for: `head` of urls, a list of a folder, or bytes of objects."""
        if request["do"] == "head":
            return json.dumps(list(self._pool.map(stores.head, request["urls"]))).encode()
        if request["do"] == "list":
            return json.dumps(stores.listed(request["url"], request["deep"])).encode()
        return self.read([(Known(*known), begin, end) for known, begin, end in request["parts"]])

    def read(self, wanted: Iterable[tuple[Known, int, int]]) -> bytes:
        """Bytes of objects, one after the other, fetched at the same time."""
        parts = [self._part(known, *piece) for known, begin, end in wanted for piece in blocks.pieces(begin, end)]
        return b"".join(part.result() if isinstance(part, Future) else part for part in parts)

    def _part(self, known: Known, number: int, begin: int, end: int) -> "bytes | Future[bytes]":
        """A part of a block, or the promise of one."""
        folder, (name, length) = blocks.folder_of(parent(known.url)), blocks.block_of(known, number)
        if folder is not None and (kept := folder.read(name, length, begin, end)) is not None:
            return kept
        first = number * blocks.BLOCK
        with self._lock:
            if (coming := self._coming.get(name)) is None:
                if folder is None or not folder.reserve(length):
                    return self._pool.submit(stores.get, known, first + begin, first + end)
                coming = self._coming[name] = self._pool.submit(self._kept, folder, known, number)
        part: Future[bytes] = Future()
        coming.add_done_callback(lambda done: _pass_on(done, part, slice(begin, end)))
        return part

    def _kept(self, folder: blocks.Folder, known: Known, number: int) -> bytes:
        """A block, fetched and kept."""
        (name, length), begin = blocks.block_of(known, number), number * blocks.BLOCK
        try:
            content = stores.get(known, begin, begin + length)
            folder.write(name, content)
            return content
        finally:
            folder.release(length)
            with self._lock:
                del self._coming[name]


def _pass_on(done: "Future[bytes]", part: "Future[bytes]", wanted: slice) -> None:
    if (error := done.exception()) is not None:
        part.set_exception(error)
    else:
        part.set_result(done.result()[wanted])


def serve(address: str) -> None:
    """Answer connections until standard input ends."""
    fetcher = Fetcher()
    with Listener(address, backlog=128) as listener:
        threading.Thread(target=_end_with_input, args=(Path(address).parent,), daemon=True).start()
        os.write(sys.stdout.fileno(), READY)
        while True:
            with suppress(OSError):
                threading.Thread(target=_answer_all, args=(fetcher, listener.accept()), daemon=True).start()


def _answer_all(fetcher: Fetcher, connection: Connection) -> None:
    """Answer what comes through one connection, one after the other."""
    with suppress(EOFError, OSError), connection:
        while True:
            connection.send_bytes(_answer(fetcher, connection.recv_bytes()))


def _answer(fetcher: Fetcher, request: bytes) -> bytes:
    try:
        return GOOD + fetcher.answer(json.loads(request))
    except UserError as error:
        return BAD + str(error).encode(errors="surrogateescape")
    except BaseException as error:  # whoever asked raises it
        return BUG + f"{type(error).__name__}: {error}".encode(errors="backslashreplace")


def _end_with_input(folder: Path) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # threads may be waiting for a store


if __name__ == "__main__":
    serve(sys.argv[1])
