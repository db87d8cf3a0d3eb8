"""How processes that were started together are told apart, missed and stopped."""

import os
import signal
import sys
import time
from unittest import mock

import pytest
import torch

from tico_ssl.cli import main
from tico_ssl.pipeline import workers
from tico_ssl.runtime import peers, process_group
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.launcher import adopt_srun, first_host, tasks_per_node, timeout_seconds
from tico_ssl.runtime.peers import Lost, Peers
from tico_ssl.training.checkpoint import StopRequest

# ---------------------------------------------------------------------------------------------------- launchers

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_NODELIST": "gpu[007-008,12],cpu1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}


def test_a_step_of_srun_is_put_into_the_words_of_torchrun():
    environment = dict(STEP)
    adopt_srun(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["9", "10", "1", "2", "gpu007"]
    other = STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    adopt_srun(other)
    assert other["MASTER_PORT"] == environment["MASTER_PORT"]  # all meet in one place
    later = STEP | {"SLURM_JOB_ID": "1235"}
    adopt_srun(later)
    assert later["MASTER_PORT"] != environment["MASTER_PORT"]  # jobs do not


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, or a shell in a job
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun in a job
    ],
)
def test_what_is_no_step_of_several_tasks_is_left_alone(environment):
    before = dict(environment)
    adopt_srun(environment)
    assert environment == before


def test_lists_of_hosts_and_tasks():
    hosts = {"a": "a", "a,b": "a", "n[3-5]": "n3", "n[03,07-09]x,m": "n03x", "a-1.b[10-11]": "a-1.b10"}
    assert {text: first_host(text) for text in hosts} == hosts
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("4(x2),2,1(x3)") == [4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_a_timeout_is_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv("TICO_TIMEOUT", text)
    with pytest.raises(UserError, match=f"TICO_TIMEOUT={text}"):
        timeout_seconds()


def test_nothing_is_overwritten_by_processes_that_are_started_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "--resume" in refused(capsys, "pretrain", "demo", "--out", str(tmp_path / "run"), "--overwrite")


def refused(capsys, *words: str) -> str:
    """The one line that a command ends with."""
    with mock.patch.object(sys, "argv", ["tico", *words]), pytest.raises(SystemExit) as stopped:
        main()
    line = capsys.readouterr().err
    assert stopped.value.code == 2
    assert line.count("\n") == 1
    return line


# ---------------------------------------------------------------------------------------------------- peers


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.05)


def test_who_is_missing_is_named_with_its_host(quick):
    store = torch.distributed.HashStore()
    silent = Peers(store, 2, 3)
    store.set("host 2", "far-away")  # it has met the others, and is heard no more
    store.set("beat 2", "7")
    with Peers(store, 0, 3) as first, Peers(store, 1, 3):
        said = first.missed()
    assert said == "process 2 (host far-away) has ended or cannot be reached"
    del silent


def test_the_reason_of_one_that_failed_is_told_by_the_others(quick):
    store = torch.distributed.HashStore()
    with Peers(store, 0, 2) as first:
        with pytest.raises(UserError), Peers(store, 1, 2):
            raise UserError("the disk is full")
        assert first.missed().endswith("ended: the disk is full")
        with (
            pytest.raises(Lost),
            Peers(store, 1, 2),
        ):  # started again; now it has lost touch itself, and is not the cause
            raise Lost("of somebody else")
        assert "full" not in first.missed()


def test_a_store_that_does_not_answer_is_not_waited_for(quick, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "gpu007")
    store = mock.MagicMock()
    store.check.side_effect = store.get.side_effect = lambda *_: time.sleep(5)
    begun = time.monotonic()
    assert "gpu007:" in Peers(store, 0, 2).missed()
    assert time.monotonic() - begun < 2


def test_silence_is_said_by_the_first_that_lives(quick, monkeypatch, capfd):
    monkeypatch.setattr(peers, "WARN_SECONDS", 0.4)
    store = torch.distributed.HashStore()
    store.set("host 0", "gone")
    store.set("beat 0", "1")
    with Peers(store, 1, 3), Peers(store, 2, 3):
        time.sleep(1.2)
    warnings = capfd.readouterr().err.splitlines()
    assert [line for line in warnings if "process 0 (host gone)" in line and "600 s (TICO_TIMEOUT)" in line] == warnings
    assert len(warnings) == 1


def test_words_of_lost_connections_are_known():
    known = [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:2812",
        "Timed out waiting 8000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was a network error",
    ]
    assert all(process_group.LOST_WORDS.search(text) for text in known)
    assert process_group._line(RuntimeError(known[0])) == "Connection closed by peer [10.0.0.2]:2812"
    assert not process_group.LOST_WORDS.search("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")


# ---------------------------------------------------------------------------------------------------- signals


def test_a_scheduler_may_warn_twice_and_a_cancellation_counts_more():
    with StopRequest() as stop:
        for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert stop.number == signal.SIGTERM
        assert stop.agreed(1)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_workers_serve_a_main_process_that_is_asked_to_stop():
    """torchrun and SLURM signal whole groups of processes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    results = workers.ahead(lambda item: (item, os.getpid()), range(40), 1)
    worker = next(results)[1]
    for number in numbers:
        os.kill(worker, number)
    assert [item for item, _ in results] == list(range(1, 40))


def test_workers_do_not_serve_forever(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 1)
    results = workers.ahead(lambda item: (time.sleep(0.05), os.getpid())[1], range(200), 1)
    os.kill(next(results), signal.SIGTERM)
    with pytest.raises(UserError, match=r"died \(SIGALRM\)"):
        list(results)
