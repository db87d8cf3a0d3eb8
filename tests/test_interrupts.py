"""Ctrl-C: answered at once even where Python is not asked for seconds, and whatever happens the run goes on later."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tico_ssl import cli, pretrain
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime import interrupts
from tico_ssl.runtime.errors import Interrupted
from tico_ssl.training.checkpoint import read_checkpoint
from tico_ssl.training.step import Step
from tiny import TINY

# A training whose fourth step is one long computation in a library, as a backward pass is: no handler is called in it.
SLOW = """
import hashlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from tico_ssl.cli import main
from tico_ssl.training.step import Step
usual, made = Step.__call__, []

def slow(self, *given):
    made.append(given)
    if len(made) == 4:
        print("in the slow step", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    return usual(self, *given)

Step.__call__ = slow
main()
"""


@pytest.fixture(autouse=True)
def listening():
    """Tests that were started in a shell's background ignore Ctrl-C, and so would what they call."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that was ended by two Ctrl-C in that step: exit code, output, errors and seconds from the first one on."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [f"{key}={value}" for key, value in TINY.items()]
    command = [sys.executable, "-c", SLOW, "pretrain", "demo", *words, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, begun = "", 0.0
    try:
        for line in process.stdout:
            said += line
            if "slow step" in line:
                begun = time.monotonic()
            if "slow step" in line or "stopping after" in line:
                process.send_signal(signal.SIGINT)
        return folder, process.wait(60), said, process.stderr.read(), time.monotonic() - begun
    finally:
        process.kill()
        process.wait()


def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback(ended):
    _, code, said, complained, seconds = ended
    assert (code, complained) == (130, "")
    assert said.endswith("stopping after this step; Ctrl-C again stops at once\n")
    assert seconds < 10  # of a step that would have taken minutes


def test_the_run_goes_on_and_one_ctrl_c_is_answered_in_the_step_and_ends_with_a_checkpoint(ended, capsys, monkeypatch):
    folder, usual = ended[0], Step.__call__

    def slow(self, *given):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        while time.monotonic() < begun + 0.2:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)
        return usual(self, *given)

    monkeypatch.setattr(Step, "__call__", slow)
    monkeypatch.setattr(interrupts, "PATIENCE", 0.05)
    with pytest.raises(Interrupted, match=r"stopped after step 4 of 9; continue with resume=True"):
        pretrain("demo", out=folder, overrides=TINY, resume=True)
    assert read_checkpoint(Run(folder).checkpoint_file)["step"] == 4
    said = capsys.readouterr().out
    assert "continuing after step 3 of 9" in said
    assert said.endswith("stopping after this step\n")


def test_what_ends_soon_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 30.0)
    with pytest.raises(KeyboardInterrupt), interrupts.answered():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    assert capsys.readouterr().out == ""
    assert all(thread.name != "interrupts" for thread in threading.enumerate())


def test_a_repeated_sigterm_is_answered_once(capsys, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.02)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with interrupts.answered(end=True):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == "stopping after this step; Ctrl-C again stops at once\n"


def test_signals_that_others_listen_to_are_left_to_them():
    with interrupts.answered():
        mine = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        with interrupts.answered():
            assert signal.set_wakeup_fd(mine, warn_on_full_buffer=False) == mine
        assert mine != -1
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_before_a_command_begins_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
