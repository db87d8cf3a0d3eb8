"""The other processes of a training: which of them live, on which hosts, and what ended the others.

A collective operation that fails says nothing about the process that is missing. So each process writes a beat to the
store in which the processes met, and its last words if it ends by an error; whoever has lost touch reads them.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from tico_ssl.runtime.errors import UserError, one_line, signal_name
from tico_ssl.runtime.launcher import TIMEOUT, timeout_seconds
from tico_ssl.runtime.printing import printable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT_SECONDS = 2.0
LISTEN_BEATS = 3.0  # in which a living process is heard
WARN_SECONDS = 30.0  # of silence, after which it is said
LEAVE_SECONDS = 10.0  # in which the thread ends, unless the store hangs
NAMED = 4  # processes in a message


class Lost(UserError):
    """Another process has ended or does not answer. The same command goes on from the last checkpoint."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class Peers:
    """Within, this process is heard by the others. Nothing here waits long for a store that does not answer."""

    def __init__(self, store: "Store", rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Peers":
        self.store.delete_key(f"end {self.rank}")  # of an earlier attempt, where the store has outlived it
        self.store.set(f"host {self.rank}", socket.gethostname())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Lost):
            words = _last_words(error)
            _within(BEAT_SECONDS, lambda: self.store.set(f"end {self.rank}", words))
        self._ended.set()
        self._thread.join(LEAVE_SECONDS)  # a thread that is inside torch when Python ends would abort the process

    def missed(self) -> str:
        """Which processes are missing, in words, after a collective operation has failed."""
        found = _within((LISTEN_BEATS + 4) * BEAT_SECONDS, self._missed)
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        return found or f"{place}, where all of them meet, does not answer: has that host or its launcher ended?"

    def _missed(self) -> str:
        self.store.set(f"end {self.rank}", "")  # it has lost touch as well, so it is not the one
        before = self._read("beat")
        time.sleep(LISTEN_BEATS * BEAT_SECONDS)
        after, words, hosts = self._read("beat"), self._read("end"), self._read("host")
        reasons = {rank: text for rank, text in words.items() if text}
        quiet = [rank for rank in range(self.world) if rank not in words and before.get(rank) == after.get(rank)]
        if reasons:
            return "; ".join(f"{_who([rank], hosts)} ended: {reasons[rank]}" for rank in sorted(reasons)[:NAMED])
        if quiet:
            return f"{_who(quiet, hosts)} {'has' if len(quiet) == 1 else 'have'} ended or cannot be reached"
        return "all of them live: is one of them stuck, or the network between them broken?"

    def _read(self, what: str) -> dict[int, str]:
        """What processes have written, by rank; without waiting for those that have not."""
        keys = {rank: f"{what} {rank}" for rank in range(self.world)}
        if not self.store.check([*keys.values()]):  # one question, as a rule, however many there are
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return dict(zip(keys, (text.decode() for text in self.store.multi_get([*keys.values()])))) if keys else {}

    def _beat(self) -> None:
        """Beat until the end. The first process of each host also listens: a GPU's operation that hangs raises nothing
        that could be put into words."""
        number, listens = 0, os.environ.get("LOCAL_RANK", "0") == "0"
        heard: dict[int, tuple[str, float]] = {}
        warned: set[int] = set()
        try:
            while not self._ended.wait(BEAT_SECONDS if number else 0):
                number += 1
                self.store.set(f"beat {self.rank}", str(number))
                if listens and number % 5 == 0:
                    self._listen(heard, warned)
        except RuntimeError:  # the store has gone, with the process that keeps it; the next collective operation fails
            return

    def _listen(self, heard: dict[int, tuple[str, float]], warned: set[int]) -> None:
        now = time.monotonic()
        for rank, beat in self._read("beat").items():
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = beat, now
        silent = [rank for rank, (_, when) in heard.items() if now - when > WARN_SECONDS]
        speaker = min((rank for rank in range(self.world) if rank not in silent), default=self.rank)
        if set(silent) - warned and self.rank <= speaker:
            warned.update(silent)
            who = _who(sorted(silent), self._read("host"))
            limit = f"the others wait for {timeout_seconds():g} s ({TIMEOUT})"
            os.write(2, f"warning: no sign of life from {who} for {WARN_SECONDS:g} s; {limit}\n".encode())


def _who(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Processes with their hosts: 'process 3 (host b)'."""
    named = ", ".join(f"{rank} (host {printable(hosts.get(rank, '?'))})" for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"process{'es' if len(ranks) > 1 else ''} {named}{more}"


def _last_words(error: BaseException) -> str:
    """Why this process ends."""
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {signal_name(getattr(error, 'exit_code', 130) - 128)}"
    return one_line(error) or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _within(seconds: float, ask: Callable[[], str | None]) -> str | None:
    """What a question to the store gives; nothing if there is no answer in time."""
    answers: list[str | None] = []

    def attempt() -> None:
        with suppress(RuntimeError):  # of torch, about a connection
            answers.append(ask())

    asking = threading.Thread(target=attempt, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
