"""A disk that is full, read-only or gone while a run trains: said in a line, tried again, and nothing is lost."""

import errno
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from tico_ssl import load_backbone, pretrain
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.json_lines import read_json_lines
from tico_ssl.training import journal
from tico_ssl.training.journal import Journal
from tico_ssl.training.loop import Course, Hooks, train
from tico_ssl.training.monitor import Monitor

CLOCK = ("seconds", "images_per_second", "data_wait")


def at_epochs(monkeypatch, happen):
    """Call `happen(epoch)` at the end of every epoch, before its checkpoint."""
    before = Monitor.epoch_ended

    def ended(self, step, epoch, epochs, bad_files=0):
        before(self, step, epoch, epochs, bad_files)
        happen(epoch)

    monkeypatch.setattr(Monitor, "epoch_ended", ended)


def written(run: Run) -> tuple[list, list, dict]:
    """Metrics without times, spectra, and weights."""
    metrics = [{key: value for key, value in line.items() if key not in CLOCK} for line in run.metrics()]
    return metrics, read_json_lines(run.spectrum_file), load_backbone(run.folder).state_dict()


def assert_same(one: Run, other: Run) -> None:
    for mine, yours in zip(written(one)[:2], written(other)[:2]):
        assert mine == yours
    weights, expected = written(one)[2], written(other)[2]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not list(one.folder.rglob("*.tmp"))


@pytest.fixture
def settings(tiny) -> dict:
    return tiny | {"training.checkpoint_seconds": 0, "training.epochs": 4}


@pytest.fixture
def undisturbed(settings, tmp_path) -> Run:
    return pretrain("demo", out=tmp_path / "undisturbed", overrides=settings)


@pytest.mark.parametrize("room", [0, 30_000])  # for nothing; for lines, but for no checkpoint
def test_training_goes_on_and_saves_when_there_is_room_again(
    settings, undisturbed, tmp_path, monkeypatch, capsys, full_disk, room
):
    with ExitStack() as stack:

        def happen(epoch):
            if epoch == 2:
                stack.enter_context(full_disk(room))
            if epoch == 4:
                stack.close()

        at_epochs(monkeypatch, happen)
        run = pretrain("demo", out=tmp_path / "run", overrides=settings)
    out = capsys.readouterr().out
    assert "warning: no checkpoint after step 6: " in out and "no checkpoint after step 9" in out
    assert ("metrics.jsonl cannot be written" in out) == (room == 0)
    assert out.count("metrics.jsonl cannot be written") < 2
    assert_same(run, undisturbed)


def test_a_disk_that_stays_full_is_an_error_at_the_end_and_the_run_resumes(
    settings, undisturbed, tmp_path, monkeypatch, full_disk
):
    with ExitStack() as stack:
        at_epochs(monkeypatch, lambda epoch: stack.enter_context(full_disk()) if epoch == 3 else None)
        words = r"^step 12 of 12 could not be saved: .*File too large; .* kept; continue with resume=True$"
        with pytest.raises(UserError, match=words):
            pretrain("demo", out=tmp_path / "run", overrides=settings)
    monkeypatch.undo()
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert torch.load(Run(tmp_path / "run").checkpoint_file, weights_only=True)["step"] == 6
    assert_same(pretrain("demo", out=tmp_path / "run", overrides=settings, resume=True), undisturbed)


@pytest.mark.parametrize("way", ["removed", "moved"])
def test_a_folder_that_vanishes_is_written_again(settings, tmp_path, monkeypatch, capsys, way):
    folder, seen = tmp_path / "run", []

    def happen(epoch):
        if epoch == 3:
            _ = shutil.rmtree(folder) if way == "removed" else folder.rename(tmp_path / "moved")
        if epoch == 4:  # it was written again after epoch 3
            seen.append((folder / "images.json").is_file() and another_command_in(folder))

    at_epochs(monkeypatch, happen)
    run = pretrain("demo", out=folder, overrides=settings)
    assert seen == ["refused"]
    assert "run was gone and is written again, without its metrics from before step 9" in capsys.readouterr().out
    assert [line["step"] for line in run.metrics()] == [10, 11, 12]
    assert run.recipe().training.epochs == 4
    assert load_backbone(folder) is not None
    if way == "moved":
        assert torch.load(Run(tmp_path / "moved").checkpoint_file, weights_only=True)["step"] == 6
        assert [line["step"] for line in Run(tmp_path / "moved").metrics()] == list(range(1, 10))
        assert another_command_in(tmp_path / "moved") == "alone"
    assert another_command_in(folder) == "alone"
    pretrain("demo", out=folder, overrides=settings, resume=True)


def another_command_in(folder) -> str:
    script = (
        "import sys; from pathlib import Path; from tico_ssl.runtime.locks import *\n"
        "try:\n with alone_in(Path(sys.argv[1]), ''): print('alone')\nexcept InUse: print('refused')"
    )
    return subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("ended", [False, True])
def test_in_the_place_of_a_folder_that_was_moved_another_run_is_left_alone(settings, tmp_path, monkeypatch, ended):
    """Whether the other one trains still, or has ended."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    settings |= {"training.loggers": []}
    other = pretrain("demo", out=tmp_path / "other", overrides=settings | {"training.epochs": 1})
    before = {file.name: file.read_bytes() for file in other.folder.rglob("*") if file.is_file()}
    with ExitStack() as stack:

        def happen(epoch):
            if epoch == 3:
                folder.rename(moved)
                other.folder.rename(folder)
                if not ended:
                    script = (
                        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
                        "print('held', flush=True); sys.stdin.read()"
                    )
                    command = [sys.executable, "-c", script, str(folder / "lock")]
                    holder = stack.enter_context(
                        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                    )
                    assert holder.stdout.readline() == b"held\n"

        at_epochs(monkeypatch, happen)
        with pytest.raises(UserError, match=r"another run has begun in its place: this one ends at step 9; what it"):
            pretrain("demo", out=folder, overrides=settings)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert torch.load(Run(moved).checkpoint_file, weights_only=True)["step"] == 6
    pretrain("demo", out=moved, overrides=settings, resume=True)


def test_a_read_only_disk_does_not_end_a_training(settings, undisturbed, tmp_path, monkeypatch, capsys):
    refused = []

    def refuse(path, *_, **__):
        refused.append(path)
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def happen(epoch):
        if epoch == 1:
            monkeypatch.setattr(journal, "append_json_line", refuse)
        if epoch == 3:
            monkeypatch.undo()

    at_epochs(monkeypatch, happen)
    run = pretrain("demo", out=tmp_path / "run", overrides=settings)
    assert refused
    assert "Read-only file system; choose another folder; its lines are kept until it can" in capsys.readouterr().out
    assert_same(run, undisturbed)


# -------------------------------------------------------------------------------------------------- without a run


def test_lines_that_cannot_be_written_are_kept_in_order(tmp_path, full_disk, capsys):
    lines = Journal(tmp_path / "metrics.jsonl", 0)
    lines.write({"step": 1})
    with full_disk():
        lines.write({"step": 2})
        lines.write({"step": 3})
        with pytest.raises(OSError):
            lines.flush()
    assert capsys.readouterr().out.count("warning") == 1
    lines.write({"step": 4})
    lines.flush()
    assert [line["step"] for line in read_json_lines(lines.file)] == [1, 2, 3, 4]


def test_damaged_lines_do_not_survive_a_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": "2"}\n{}\nnull\n\xff\n{"step": 3}\n{"step": 9}\n{"st')
    assert Journal(file, 5).kept == [{"step": 1}, {"step": 3}]
    assert file.read_text() == '{"step": 1}\n{"step": 3}\n'


def five_steps(save, go_on="; once more"):
    from tico_ssl.methods._base import StepOutput
    from tico_ssl.training.clock import Clock
    from tico_ssl.training.display import Display
    from tico_ssl.training.step import Outcome

    outcome = Outcome(StepOutput(torch.tensor(1.0)))
    hooks = Hooks(lambda *_: outcome, lambda done: False, lambda *_: None, lambda done: True, save)
    clock = Clock()
    batches = (number for number in range(5))
    train(Course(0, 5, seed=0, name="five", go_on=go_on), batches, hooks, clock, Display("five", 5, 0))
    return clock


def test_a_save_that_is_refused_is_due_again(capsys):
    tried = []

    def save(done):
        tried.append(done)
        if done < 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    assert five_steps(save).ever_saved
    assert tried == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("No space left on device; free some space; it is tried again") == 3


def test_a_save_that_fails_otherwise_ends_the_training():
    def save(done):
        raise ZeroDivisionError("a mistake of the program")

    with pytest.raises(ZeroDivisionError):
        five_steps(save)


def test_the_last_save_must_succeed():
    def save(done):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = r"^five: step 5 of 5 could not be saved: No space left on device; free some space; .* is kept; once more$"
    with pytest.raises(UserError, match=words):
        five_steps(save)


def test_an_exhausted_gpu_is_said_with_what_to_change(settings, tmp_path, monkeypatch):
    from tico_ssl.training.step import Step

    def full(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(Step, "__call__", full)
    words = r"^out of GPU memory: lower training.batch_size .*--find-batch.*training.parts, .*training.recompute=true$"
    with pytest.raises(UserError, match=words):
        pretrain("demo", out=tmp_path / "run", overrides=settings)
