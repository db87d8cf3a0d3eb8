"""Jobs of a real SLURM that are warned, pushed aside, cancelled and queued again (`make test-slurm`; needs root and
Debian's packages)."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from cluster import CPUS, cluster, job_field, obstacle, run, wait_until

from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.slurm import known_jobs, log_of
from tico_ssl.studies import study
from tico_ssl.training.checkpoint import read_checkpoint
from tiny import TINY

pytest.importorskip("submitit")
ROOT = Path(__file__).parents[2]
SETTINGS = TINY | {"training.epochs": 30, "training.checkpoint_seconds": 1e6}  # a checkpoint at the end, and on request
STEPS = 90
TWO = f"partition=low,tasks={CPUS},time=30"
ONE = "partition=low,time=30"


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory):
    if reason := obstacle():
        pytest.skip(reason)
    os.environ["TICO_DEVICE"] = "cpu"
    with cluster(tmp_path_factory.mktemp("cluster")):
        yield


def tico(*words: str) -> str:
    return run(sys.executable, "-m", "tico_ssl", *words)


def words(settings: dict) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def submitted(out: Path, *more: str) -> str:
    """The number of a job that trains with two processes."""
    said = tico("pretrain", "demo", *words(SETTINGS), "--out", str(out), "--slurm", TWO, *more)
    job = known_jobs(out)[out.name]
    assert f"job {job}" in said
    assert str(log_of(out, job)) in said
    return job


def last_step(out: Path) -> int:
    return max((line.get("step", 0) for line in Run(out).metrics()), default=0)


def state(out: Path) -> dict:
    read = read_checkpoint(Run(out).checkpoint_file)
    return {"step": torch.tensor(read["step"]), **read["method"]}


def ended(job: str, out: Path) -> None:
    wait_until(lambda: job_field(job, "JobState") in ("COMPLETED", "FAILED"), 240, f"the end of job {job}")
    assert job_field(job, "JobState") == "COMPLETED", log_of(out, job).read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """An uninterrupted run with as many processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ended(submitted(out), out)
    assert "2 processes" in (out / "train.log").read_text()
    return state(out)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def more_steps(out: Path, than: int) -> None:
    wait_until(lambda: last_step(out) > than, 120, f"a step after {than}")


def push_aside(job: str) -> None:
    """A job of more weight that needs all processors."""
    run("sbatch", "--partition=high", f"--ntasks={CPUS}", "--output=/dev/null", "--wrap=sleep 1")
    wait_until(lambda: job_field(job, "Restarts") == "2", 90, "a second start")


def test_warned_and_pushed_aside_a_job_ends_to_the_same_bits(tmp_path, whole):
    out = tmp_path / "run"
    job = submitted(out)
    more_steps(out, 10)
    run("scancel", "--signal=USR2", job)  # as SLURM does before the time is over
    warned = time.monotonic()
    wait_until(lambda: job_field(job, "Restarts") == "1", 60, "a second start")
    first = int(state(out)["step"])
    sys.stdout.write(f"\nqueued again {time.monotonic() - warned:.1f} s after the warning, at step {first}\n")
    assert 0 < first < STEPS
    more_steps(out, first)
    sys.stdout.write(f"the next step came {time.monotonic() - warned:.1f} s after the warning\n")
    push_aside(job)
    second = int(state(out)["step"])
    assert first < second < STEPS
    ended(job, out)
    log = (out / "train.log").read_text()
    assert f"continuing after step {first} of {STEPS}" in log
    assert f"continuing after step {second} of {STEPS}" in log
    assert_same(state(out), whole)
    assert [line["step"] for line in Run(out).metrics()] == list(range(1, STEPS + 1))


def test_a_cancelled_job_ends_with_a_checkpoint_and_is_not_queued_again(tmp_path, whole):
    out = tmp_path / "run"
    job = submitted(out)
    more_steps(out, 5)
    with pytest.raises(AssertionError, match=f"has a job already: {job}"):
        submitted(out, "--resume")
    run("scancel", job)
    wait_until(lambda: job_field(job, "JobState") == "CANCELLED", 60, "the end")
    assert job_field(job, "Restarts") == "0"
    stopped = int(state(out)["step"])
    assert 5 < stopped < STEPS
    again = submitted(out, "--resume")
    assert again != job
    ended(again, out)
    assert_same(state(out), whole)


def test_the_example_is_queued_again_too(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    out = tmp_path / "run"
    options = ["--parsable", "--nodes=1", f"--ntasks-per-node={CPUS}", "--cpus-per-task=1", "--gpus-per-node=0"]
    options += [f"--output={tmp_path}/log.txt", "--partition=low"]
    script = str(ROOT / "examples" / "pretrain.sbatch")
    job = run("sbatch", *options, script, "demo", *words(SETTINGS), "--out", str(out)).strip()
    more_steps(out, 5)
    run("scancel", "--signal=USR2", job)
    wait_until(lambda: job_field(job, "Restarts") == "1", 60, (tmp_path / "log.txt").read_text())
    wait_until(lambda: job_field(job, "JobState") in ("COMPLETED", "FAILED"), 240, "the end")
    assert_same(state(out), whole)


def results(folder: Path) -> list[dict]:
    """A study's table without what depends on the clock."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key not in ("seconds", "images_per_second")} for row in rows]


def written(folder: Path, **values) -> str:
    settings = {key: value for key, value in TINY.items() if key != "training.epochs"}
    protocols = {"knn": {"voters": [{"k": 5, "temperature": 0.1}]}}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"overrides": settings, "protocols": protocols} | values))
    return str(path)


def test_a_study_is_an_array_with_the_table_of_a_local_one(tmp_path):
    """One of its runs fails, one is warned; all that is left is submitted by the same command."""
    runs = [{"name": "bad", "overrides": {"training.batch_size": 200}}, {"name": "good"}, {"name": "late"}]
    file, out = written(tmp_path, runs=runs, budget={"epochs": 25}), tmp_path / "out"
    said = tico("study", file, "--out", str(out), "--slurm", ONE)
    assert "3 runs" in said
    jobs = known_jobs(out)
    assert {job.partition("_")[0] for job in jobs.values()} == {jobs["bad-seed0"].partition("_")[0]}
    assert "3 are in the queue already" in tico("study", file, "--out", str(out), "--slurm", ONE)
    late = out / "late-seed0"
    more_steps(late, 5)
    run("scancel", "--signal=USR2", jobs["late-seed0"])
    wait_until(lambda: not run("squeue", "--noheader").strip(), 300, "the end of all runs")
    assert "continuing after step" in (late / "train.log").read_text()
    local = study(file, out=tmp_path / "local", side_by_side=1)
    assert results(out) == results(tmp_path / "local")
    assert local.failures.keys() == {"bad-seed0"}
    assert {path.name for path in out.glob("results.*")} == {"results.md", "results.csv", "results.json"}
    again = tico("study", file, "--out", str(out), "--slurm", ONE)
    assert "2 of 3 runs are done" in again
    assert "1 run," in again


def test_a_budget_of_seconds_is_measured_by_a_job_before_the_others(tmp_path):
    file, out = written(tmp_path, budget={"seconds": 0.5}), tmp_path / "out"
    said = tico("study", file, "--out", str(out), "--slurm", ONE)
    assert "which measures how fast 1 of them" in said
    wait_until(lambda: not run("squeue", "--noheader").strip(), 200, "the end")
    (row,) = results(out)
    assert row["seeds"] == [0] and row["epochs"] >= 1
