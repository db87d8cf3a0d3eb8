"""What is asked of SLURM, which jobs are queued again, and who writes the table of a study; without a cluster."""

import json
import os
import pickle
import signal
import stat
import sys
import threading
from unittest import mock

import pytest
import yaml

from test_launch import refused
from tico_ssl.cli import main
from tico_ssl.runtime import slurm
from tico_ssl.runtime.errors import Interrupted
from tico_ssl.runtime.extras import install_command
from tico_ssl.studies import slurm as studies_slurm
from tico_ssl.training.slurm import Pretraining


def test_what_is_asked_of_slurm():
    asked = slurm.wanted("partition=gpu,nodes=4,gpus=8,time=1-12,account=us,exclude=n[1,3-4],mem=64G")
    assert (asked.nodes, asked.tasks, asked.minutes) == (4, 8, 36 * 60)
    assert asked.numbers == {"gpus_per_node": 8}
    assert asked.texts == {"partition": "gpu", "account": "us", "exclude": "n[1,3-4]", "mem": "64G"}
    alone = slurm.wanted("cpus=4,tasks=2")
    assert (alone.nodes, alone.tasks, alone.minutes, alone.numbers) == (1, 2, 24 * 60, {"cpus_per_task": 4})


def test_times_are_those_of_slurm():
    times = {"90": 90, "90:00": 90, "1:30:00": 90, "0:30": 1, "2-12": 3600, "2-12:30": 3630, "1-00:00:01": 1441}
    assert {text: slurm.minutes_of(text) for text in times} == times


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("partion=gpu", "did you mean 'partition'"),
        ("gpus=0", "gpus=0: a number from 1"),
        ("nodes=many", "a number from 1"),
        ("time=soon", "HH:MM:SS"),
        ("time=0", "at least a minute"),
        ("partition", "partition=..."),
        ("", "no such key"),
    ],
)
def test_mistakes_are_one_line(asked, said, capsys):
    assert said in refused(capsys, "pretrain", "demo", "--slurm", asked)


def test_runs_of_a_study_are_single_processes(capsys):
    assert "one process" in refused(capsys, "study", "methods-textures", "--slurm", "gpus=8")


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ("pretrain", "demo", "--out", str(tmp_path / "run"), "--slurm", "gpus=1")
    assert "no SLURM" in refused(capsys, *command)
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda name: None)
    assert install_command("slurm") in refused(capsys, *command)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Commands of SLURM that take jobs and do nothing; a list of what they were told."""
    pytest.importorskip("submitit")
    commands, told = tmp_path / "commands", tmp_path / "told"
    commands.mkdir()
    answers = {"sbatch": "Submitted batch job 77", "srun": "", "squeue": "77\n77_1", "scontrol": " PreemptTime=None "}
    for name, answer in answers.items():
        file = commands / name
        file.write_text(f"#!/bin/sh\necho {name} $@ >> {told}\nprintf '{answer}'\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return lambda: told.read_text().splitlines() if told.exists() else []


def said_by(*words: str, capsys) -> str:
    with mock.patch.object(sys, "argv", ["tico", *words]), pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_a_run_is_submitted_with_its_settings_and_not_twice(tmp_path, tiny, scheduler, capsys):
    out = tmp_path / "run"
    words = ["pretrain", "demo", *(f"{key}={value}" for key, value in tiny.items()), "--out", str(out)]
    said = said_by(*words, "--slurm", "partition=gpu,nodes=2,gpus=4,time=60", capsys=capsys)
    assert "job 77" in said
    assert f"tail -F {out}/slurm/77_0_log.out" in said
    script = next((out / "slurm").glob("*.sh")).read_text()
    for option in ("nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "partition=gpu", "time=60", "signal=USR2@120"):
        assert f"#SBATCH --{option}\n" in script
    assert "#SBATCH --requeue\n" in script
    work = pickle.loads((out / "slurm" / "77_submitted.pkl").read_bytes()).function
    assert work == Pretraining(mock.ANY, str(out))
    assert work.recipe["training"]["batch_size"] == 32
    assert "has a job already: 77" in refused(capsys, *words, "--slurm", "gpus=1")
    assert "remove the folder" in refused(capsys, *words, "--overwrite", "--slurm", "gpus=1")


def test_a_study_is_submitted_as_far_as_it_is_not_yet(tmp_path, tiny, scheduler, capsys):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({"overrides": tiny, "runs": [{"name": name} for name in "abc"]}))
    command = ("study", str(file), "--out", str(out), "--slurm", "gpus=1", "--side-by-side", "2")
    said = said_by(*command, capsys=capsys)
    assert "3 runs" in said
    assert "#SBATCH --array=0-2%2\n" in next((out / "slurm").glob("*.sh")).read_text()
    assert slurm.known_jobs(out) == {"a-seed0": "77_0", "b-seed0": "77_1", "c-seed0": "77_2"}
    assert "1 are in the queue already" in (again := said_by(*command, capsys=capsys))
    assert "2 runs" in again
    assert (out / "study.yaml").is_file()


@pytest.mark.parametrize(
    ("number", "preempted", "again"),
    [
        (signal.SIGUSR2, False, True),
        (signal.SIGUSR1, False, True),
        (signal.SIGTERM, False, False),  # cancelled
        (signal.SIGTERM, True, True),
        (signal.SIGINT, True, False),
    ],
)
def test_which_jobs_are_queued_again(scheduler, tmp_path, number, preempted, again):
    if preempted:
        file = tmp_path / "commands" / "scontrol"
        file.write_text(file.read_text().replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00"))

    def stopped() -> None:
        raise Interrupted("stopped", number)

    with pytest.raises(SystemExit) as ended:
        slurm.carry_out(stopped)
    assert ended.value.code == 128 + number
    assert ("scontrol requeue 77" in scheduler()) == again


def test_whoever_ends_writes_the_table_with_the_failures_of_the_others(tmp_path, tiny):
    names = ("a-seed0", "b-seed0")
    (tmp_path / "costs").mkdir()
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({"overrides": tiny, "runs": [{"name": "a"}, {"name": "b"}], "protocols": ["knn"]})
    )
    together = [
        threading.Thread(target=studies_slurm.write_table, args=("mine", tmp_path, name, f"{name} failed"))
        for name in names
    ]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["failed"] for row in rows] == [{name: f"{name} failed"} for name in names]
    studies_slurm.write_table("mine", tmp_path, "a-seed0")  # it went well this time
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [len(row["failed"]) for row in rows] == [0, 1]
