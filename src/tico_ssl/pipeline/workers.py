"""Work done ahead by worker processes, with results in order: decoding images, making a detector's batches.

Processes, because such work holds the GIL often enough to keep a GPU waiting; threads where fork is not available.
Results are sent through a pipe, but pixels are written into a ring buffer in memory that workers inherit from the main
process: no copies, no allocations, and no use of /dev/shm, which is small in containers.

Each worker has a connection of its own and shares no lock. So one that dies is noticed at once, where its result is
awaited, and workers end with the main process, however it ends: their connection is then closed.

A fork copies locks as they are, but not the threads that would release them. Nothing that workers of this package do
takes a lock that another thread may hold: torch is told to use one thread before its first operation, sources that have
locks or open files have them per process, and workers print nothing. A data set of the user's own may, and a disk may
not answer: so nobody waits for a worker without an end.
"""

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, islice
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.bad_files import in_order
from tico_ssl.runtime.errors import UserError, one_line, refusal, signal_name
from tico_ssl.runtime.progress import say

S = TypeVar("S")
T = TypeVar("T")
MOST_WORKERS = 16  # limit of the default
MOST_PER_CORE = 32  # limit of what may be asked for: more processes only get in each other's way
AHEAD = 2  # items prefetched per worker, unless told otherwise
NICE = 5  # of gentle processes, which then get a quarter of a core that this process wants too
SILENCE = 60.0  # seconds without a result after which that is said
MOST_SILENCE = 30  # times as long is an error; counted one by one, since a job that a scheduler stops for hours is none
GRACE_SECONDS = 60  # in which a main process that is asked to stop still has its workers
ALIGNED = 64  # alignment in bytes of arrays in a slot
CAN_FORK = sys.platform.startswith("linux")  # fork is not safe elsewhere


def default_workers() -> int:
    """One per CPU core of this process, at most `MOST_WORKERS`."""
    return min(MOST_WORKERS, max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def chosen_workers(asked: int | None, setting: str = "workers") -> int:
    """The number that was asked for, if it is sensible, or the default."""
    most = MOST_PER_CORE * _cores()
    if asked is not None and asked > most:
        raise UserError(f"{setting} is {asked}: at most {most} on this machine, {MOST_PER_CORE} per CPU core")
    return asked or default_workers()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(
    work: Callable[[S], T],
    items: Iterable[S],
    workers: int,
    processes: bool = CAN_FORK,
    setting: str = "workers",
    gentle: bool = False,
    prefetched: int = AHEAD,
) -> Generator[T]:
    """`work` of every item, in order. `setting` is the name of the number of workers in error messages. `gentle`
    processes leave the CPU to this one while it needs it. Each worker has up to `prefetched` items to do. Either these
    or their results may be large, not both: whoever sends more than a pipe holds waits for the other."""
    if not processes:
        with ThreadPoolExecutor(workers) as pool:
            yield from in_order(pool, work, items, prefetched * workers)
        return
    with _team(work, workers, setting, NICE if gentle else 0) as team:
        turns, waiting, rest = count(), deque[_Worker[S, T]](), iter(items)

        def send(number: int) -> None:
            for item in islice(rest, number):
                waiting.append(team[next(turns) % workers])
                waiting[-1].send(item)

        send(prefetched * workers)
        while waiting:
            done = waiting.popleft().receive()
            send(1)
            yield done


@contextmanager
def _team(work: Callable[[S], T], workers: int, setting: str, nice: int) -> Iterator[list["_Worker[S, T]"]]:
    """Worker processes, which end with this context."""
    team: list[_Worker[S, T]] = []
    try:
        for _ in range(workers):
            try:
                team.append(_Worker(work, [other.connection for other in team], f"{setting} (now {workers})", nice))
            except OSError as error:  # no process, no memory or no open file is left for it
                reason = f"process {len(team) + 1} of {workers} cannot be started ({refusal(error)})"
                raise UserError(f"{reason}: lower {setting}") from error
        yield team
    finally:
        for worker in team:
            worker.process.kill()  # it holds nothing that could be left half done
            worker.connection.close()
        for worker in team:
            worker.process.join()


class _Worker(Generic[S, T]):
    """A process that does work on request."""

    def __init__(self, work: Callable[[S], T], others: list[Connection], setting: str, nice: int) -> None:
        self.setting = setting
        self.connection, theirs = multiprocessing.Pipe()
        inherited = [*others, self.connection]
        self.process: ForkProcess = multiprocessing.get_context("fork").Process(
            target=_serve, args=(work, theirs, inherited, nice), daemon=True
        )
        try:
            self.process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def send(self, item: S) -> None:
        """Request work."""
        try:
            self.connection.send(item)
        except ConnectionError as error:
            raise self._death() from error

    def receive(self) -> T:
        """The result of the oldest request, or its error."""
        try:
            self._await()
            done, error = self.connection.recv()
        except (EOFError, ConnectionError) as closed:
            raise self._death() from closed
        if error is not None:
            raise error
        result: T = done
        return result

    def _await(self) -> None:
        """Wait for a result, or for the end of the process, but not for ever."""
        for silences in range(MOST_SILENCE):
            if self.connection.poll(SILENCE):
                return
            if silences == 0:
                say(f"waiting for a worker process: no result for {SILENCE:g} s")
        raise UserError(
            f"a worker process is stuck: no result for {SILENCE * MOST_SILENCE:g} s. Does the disk of the images "
            "answer? A data set in Python must not use a lock or a thread from before its processes were started"
        )

    def _death(self) -> UserError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = "" if code is None else f" ({signal_name(-code) if code < 0 else f'exit code {code}'})"
        return UserError(f"a worker process died{how}; if memory is short, lower {self.setting}")


def _serve(work: Callable[[S], T], connection: Connection, inherited: list[Connection], nice: int) -> None:
    """The life of a worker. Signals are left to the main process, whose handlers and connections a fork inherits."""
    _leave_signals_alone()
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    os.nice(nice)
    with suppress(EOFError, ConnectionError):  # the main process has closed the connection, or has ended
        while True:
            connection.send(_attempt(work, connection.recv()))


def _leave_signals_alone() -> None:
    """Launchers and schedulers signal whole groups of processes: a worker serves a main process that is asked to stop
    until that has saved its state, and ends a minute after SIGTERM in any case."""
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_SECONDS))


def _attempt(work: Callable[[S], T], item: S) -> tuple[T | None, Exception | None]:
    """The result of some work, or its error in a form that can be sent."""
    try:
        return work(item), None
    except Exception as error:
        if (line := one_line(error)) is not None:
            return None, UserError(line)
        text = "".join(traceback.format_exception(error))
        try:
            sent: Exception = pickle.loads(pickle.dumps(error))
        except Exception:
            sent = RuntimeError(repr(error))
        sent.add_note(f"in a worker process:\n{text}")
        return None, sent


@contextmanager
def shared_ring(slots: int, capacity: int, device: torch.device | None = None) -> Iterator[Tensor]:
    """Memory (slots, bytes) shared with forked processes; page-locked for a GPU, if one is given, so that copies
    overlap with computation."""
    memory = mmap.mmap(-1, max(1, slots * capacity))
    ring = torch.frombuffer(memory, dtype=torch.uint8)[: slots * capacity].view(slots, capacity)
    on_gpu = device is not None and device.type == "cuda"
    registered = on_gpu and int(_cuda().cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)) == 0
    try:
        yield ring
    finally:
        if registered:
            torch.cuda.synchronize(device)
            _cuda().cudaHostUnregister(ring.data_ptr())


def arrays_ahead(
    work: Callable[[int], list[np.ndarray]], numbers: range, workers: int, capacity: int
) -> Iterator[list[np.ndarray]]:
    """`work` of every number, in order: lists of arrays, of which up to `capacity` bytes are shared instead of piped.
    They are valid until the next list is requested, which may overwrite them."""
    slots = AHEAD * workers + 2  # one in use, one spare, the others written ahead
    with shared_ring(slots, capacity) as memory:
        ring = memory.numpy()

        def stored(number: int) -> list["np.ndarray | _Stored"]:
            return _stored(work(number), ring[(number - numbers.start) % slots])

        for number, kept in zip(numbers, ahead(stored, numbers, workers), strict=True):
            slot = ring[(number - numbers.start) % slots]
            yield [one.found_in(slot) if isinstance(one, _Stored) else one for one in kept]


class _Stored(NamedTuple):
    """Position of an array in a slot."""

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def found_in(self, slot: np.ndarray) -> np.ndarray:
        """The array."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return slot[self.begin : self.begin + size].view(self.dtype).reshape(self.shape)


def _stored(arrays: list[np.ndarray], slot: np.ndarray) -> list["np.ndarray | _Stored"]:
    """Write arrays into a slot, one after the other; those that do not fit are returned as they are."""
    begin, kept = 0, list["np.ndarray | _Stored"]()
    for array in arrays:
        if begin + array.nbytes > len(slot):
            kept.append(array)
            continue
        place = _Stored(begin, array.dtype, array.shape)
        place.found_in(slot)[...] = array
        kept.append(place)
        begin += -(-array.nbytes // ALIGNED) * ALIGNED
    return kept


def _cuda() -> Any:
    return torch.cuda.cudart()
