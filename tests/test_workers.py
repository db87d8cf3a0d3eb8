"""Worker processes that die, cannot be started, or outlive nobody."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from faults import FAULTS
from tico_ssl.pipeline import workers as module
from tico_ssl.pipeline.workers import ahead, chosen_workers
from tico_ssl.runtime.errors import UserError, signal_name

pytestmark = pytest.mark.skipif(not module.CAN_FORK, reason="no worker processes here")


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"


def gone(processes, seconds=10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, processes)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def numbered(number: int) -> tuple[int, int]:
    time.sleep(0.001)
    return number, os.getpid()


@pytest.mark.faults
def test_a_worker_killed_at_any_moment_is_one_line_and_the_others_end():
    draw = random.Random(0)
    for _ in range(5 * FAULTS):
        results = ahead(numbered, range(1000), 3, setting="training.workers")
        processes = list({next(results)[1] for _ in range(3)})
        for _ in range(draw.randrange(20)):
            next(results)
        time.sleep(draw.random() * 0.003)
        os.kill(draw.choice(processes), signal.SIGKILL)
        with pytest.raises(UserError) as caught:
            list(results)
        words = "a worker process died (SIGKILL); if memory is short, lower training.workers (now 3)"
        assert str(caught.value) == words
        assert gone(processes) and not multiprocessing.active_children()
    print(f"killed workers: {5 * FAULTS} of {5 * FAULTS} said in one line")


def test_work_goes_on_undisturbed_until_the_result_of_a_dead_worker_is_due():
    """No error strikes the main process in the middle of something else, such as a training step."""
    results = ahead(numbered, range(100), 2)
    first, second = (next(results)[1] for _ in range(2))
    os.kill(second, signal.SIGKILL)
    time.sleep(0.1)
    assert sum(i * i for i in range(200_000))  # in which a signal handler would have raised
    assert next(results)[1] == first
    with pytest.raises(UserError, match="died"):
        list(results)


def test_a_worker_that_waits_for_a_lock_of_another_process_is_one_line(monkeypatch, capsys):
    """A fork copies a lock that a thread holds, and not the thread: nobody will release it there."""
    monkeypatch.setattr(module, "SILENCE", 0.2)
    monkeypatch.setattr(module, "MOST_SILENCE", 3)
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def work(number):
        if number == 1:
            lock.acquire()
        return os.getpid()

    results = ahead(work, range(4), 1)
    process = next(results)
    with pytest.raises(UserError, match=r"^a worker process is stuck: no result for 0\.6 s\. Does the disk"):
        next(results)
    assert gone([process])
    assert capsys.readouterr().out.count("waiting for a worker process: no result for 0.2 s") == 1
    done.set()
    thread.join()


def test_a_slow_worker_is_waited_for(monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.05)
    assert list(ahead(lambda number: (time.sleep(0.2), number)[1], range(3), 2)) == [0, 1, 2]


def test_operations_in_workers_do_not_wait_for_threads_of_the_main_process():
    """Not those of torch's pool, which a fork does not copy, nor those of a pool that is at work meanwhile."""
    threads, large = torch.get_num_threads(), torch.rand(2000, 500)
    torch.set_num_threads(4)
    try:
        expected = float((large @ large.T).sum() + large.sort().values.sum())  # the pool is there from now on
        with ThreadPoolExecutor(4) as pool:
            busy = [pool.submit(lambda: [large.sum() for _ in range(200)]) for _ in range(4)]
            found = list(ahead(lambda _: float((large @ large.T).sum() + large.sort().values.sum()), range(4), 2))
            assert all(future.result() for future in busy)
    finally:
        torch.set_num_threads(threads)
    assert found == pytest.approx([expected] * 4, rel=1e-4)


def test_a_worker_that_ends_by_itself_is_said():
    with pytest.raises(UserError, match=r"^a worker process died \(exit code 3\); if memory is short, lower workers"):
        list(ahead(lambda _: os._exit(3), range(3), 1))


def test_signals_have_names():
    assert [signal_name(number) for number in (9, 15, 50)] == ["SIGKILL", "SIGTERM", "signal 50"]


def test_what_the_machine_refuses_in_a_worker_is_one_line():
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", "scratch")

    with pytest.raises(UserError, match=r"^scratch: No space left on device; free some space$"):
        list(ahead(full, range(3), 2))


def test_an_error_of_the_program_comes_with_the_lines_where_it_arose():
    class Own(Exception):  # which cannot be sent
        pass

    def wrong(_):
        raise Own("of a kind of its own")

    with pytest.raises(RuntimeError, match="of a kind of its own") as caught:
        list(ahead(wrong, range(3), 2))
    assert "in wrong" in caught.value.__notes__[0]


def test_of_processes_that_cannot_all_be_started_none_is_left(monkeypatch):
    started = []
    start = multiprocessing.context.ForkProcess.start

    def limited(self):
        if len(started) == 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(self)
        started.append(self.pid)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", limited)
    words = r"^process 4 of 9 cannot be started \(Resource temporarily unavailable\): lower training.workers$"
    with pytest.raises(UserError, match=words):
        next(ahead(numbered, range(10), 9, setting="training.workers"))
    assert len(started) == 3 and gone(started)


def test_absurd_numbers_of_workers_are_refused(monkeypatch, folder_of_images, tmp_path):
    from tico_ssl import pretrain

    monkeypatch.setattr(module, "_cores", lambda: 2)
    assert chosen_workers(64) == 64
    assert chosen_workers(None) == 2
    with pytest.raises(UserError, match=r"^training.workers is 65: at most 64 on this machine, 32 per CPU core$"):
        chosen_workers(65, "training.workers")
    settings = {"data.source": str(folder_of_images), "training.batch_size": 4, "training.workers": 10**6}
    with pytest.raises(UserError, match=r"training\.workers"):
        pretrain("demo", out=tmp_path / "run", overrides=settings)
    assert not (tmp_path / "run").exists()


KILLED = """
import os, time
from tico_ssl.pipeline.workers import ahead
results = ahead(lambda number: (time.sleep(0.01), os.getpid())[1], range(10**6), 3)
other = ahead(lambda number: os.getpid(), range(10**6), 2)  # whose workers inherit connections of the first
print(*{next(results) for _ in range(3)}, *{next(other) for _ in range(2)}, flush=True)
for _ in results:
    pass
"""


def test_workers_end_with_a_main_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as main:
        processes = [int(word) for word in main.stdout.readline().split()]
        assert len(processes) == 5 and all(map(alive, processes))
        main.kill()
        main.wait()
        assert gone(processes)
