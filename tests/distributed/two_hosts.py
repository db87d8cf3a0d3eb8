"""Training on two hosts that die, hang and vanish (`make test-distributed`; needs root and iproute2)."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hosts import Host, obstacle, two_hosts, wait_until

from tico_ssl.results.run_folder import Run
from tico_ssl.training.checkpoint import read_checkpoint
from tiny import TINY

TICO = (sys.executable, "-m", "tico_ssl")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SETTINGS = TINY | {"training.epochs": 24, "training.checkpoint_seconds": 0.0}  # a checkpoint per epoch, of 3 steps
STEPS = 72
ENDLESS = SETTINGS | {"training.epochs": 4000}
TIMEOUT = 8.0  # seconds that processes wait for each other
LISTENING = 25.0  # in which a process finds out who is missing, and ends


@pytest.fixture(scope="module")
def pair():
    if reason := obstacle():
        pytest.skip(reason)
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(pair):
    yield pair
    for host in pair:
        host.kill()
        host.join()
        host.started.clear()


def words(out: Path, settings: dict) -> list[str]:
    return ["pretrain", "demo", *(f"{key}={value}" for key, value in settings.items()), "--out", str(out), "--resume"]


def begin(hosts: tuple[Host, Host], out: Path, settings: dict, port: int):
    """A process on each host, as srun starts them."""
    master = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    master |= {"TICO_TIMEOUT": str(TIMEOUT)}
    for rank, host in enumerate(hosts):
        yield host.start(out.with_name(f"{host.name}.log"), *TICO, *words(out, settings), RANK=str(rank), **master)


def agent(host: Host, hosts: tuple[Host, Host], out: Path, settings: dict, nodes: str, port: int):
    """torchrun on a host; the first one keeps the rendezvous."""
    meeting = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", host.address]
    meeting += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{port}", "--rdzv-id", out.name]
    meeting += ["--rdzv-conf", "last_call_timeout=5,join_timeout=120"]
    log = out.with_name(f"{host.name}.log")
    command = (*TORCHRUN, *meeting, "-m", "tico_ssl", *words(out, settings))
    # Without the second variable a host that comes back waits in vain for the place of meeting (pytorch issue 135712).
    return host.start(log, *command, TICO_TIMEOUT=str(TIMEOUT), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def last_step(out: Path) -> int:
    return max((line.get("step", 0) for line in Run(out).metrics()), default=0)


def state(out: Path) -> dict:
    read = read_checkpoint(Run(out).checkpoint_file)
    return {"step": read["step"], **read["method"]}


def said(out: Path, host: Host) -> str:
    return out.with_name(f"{host.name}.log").read_text()


def assert_same(one: dict, other: dict, **tolerance: float) -> None:
    """To the bit, unless a tolerance is given."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not torch.is_tensor(value):
            assert value == other[name], name
        elif tolerance:
            torch.testing.assert_close(value, other[name], msg=name, **tolerance)
        else:
            assert torch.equal(value, other[name]), name


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory) -> dict[str, dict]:
    """Uninterrupted runs on two hosts, by precision."""
    made = {}
    for port, precision in enumerate(("fp32", "fp64"), 26_000):
        out = tmp_path_factory.mktemp("whole") / "run"
        both = list(begin(pair, out, SETTINGS | {"training.precision": precision}, port))
        assert [process.wait(timeout=240) for process in both] == [0, 0], said(out, pair[0])
        made[precision] = state(out)
    for host in pair:
        host.started.clear()
    return made


def test_a_host_that_dies_and_comes_back(hosts, whole, tmp_path):
    """torchrun goes on from the last verified checkpoint, and ends to the bit as an uninterrupted run: with as many
    processes as before, sums are made in the same order."""
    out = tmp_path / "run"
    first, second = hosts
    left = agent(first, hosts, out, SETTINGS, "2", 26_010)
    agent(second, hosts, out, SETTINGS, "2", 26_010)
    wait_until(lambda: last_step(out) >= 16, 120, "16 steps")
    second.kill()
    died, reached = time.monotonic(), last_step(out)
    assert reached < STEPS
    second.started.clear()
    back = agent(second, hosts, out, SETTINGS, "2", 26_010)
    log = Run(out).folder / "train.log"
    wait_until(lambda: "continuing after step" in log.read_text(), 150, said(out, first))
    lines = len(Run(out).metrics())
    wait_until(lambda: len(Run(out).metrics()) != lines or left.poll() is not None, 60)
    sys.stdout.write(f"\nfrom the death of a host to the next step: {time.monotonic() - died:.1f} s\n")
    assert [process.wait(timeout=240) for process in (left, back)] == [0, 0], said(out, first)
    assert_same(state(out), whole["fp32"])
    assert [line["step"] for line in Run(out).metrics()] == list(range(1, STEPS + 1))  # none is missing or twice


def test_a_host_that_dies_for_good(hosts, whole, tmp_path):
    """With --nnodes 1:2 the other goes on alone, with the same batch: equal up to the order of sums, in float64."""
    out, settings = tmp_path / "run", SETTINGS | {"training.precision": "fp64"}
    first, second = hosts
    left = agent(first, hosts, out, settings, "1:2", 26_020)
    agent(second, hosts, out, settings, "1:2", 26_020)
    wait_until(lambda: last_step(out) >= 16, 120, "16 steps")
    assert "2 processes" in said(out, first) + said(out, second)
    second.kill()
    died = time.monotonic()
    log = Run(out).folder / "train.log"
    wait_until(lambda: "continuing after step" in log.read_text(), 150, said(out, first))
    sys.stdout.write(f"\nfrom the death of a host to going on without it: {time.monotonic() - died:.1f} s\n")
    assert left.wait(timeout=240) == 0, said(out, first)
    assert "1 process\n" in said(out, first)
    assert_same(state(out), whole["fp64"], rtol=1e-7, atol=1e-9)


def process_of(host: Host) -> int:
    """The process that trains there."""
    (found,) = [pid for pid in host.processes() if b"pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_one_process_stops_both_with_one_checkpoint(hosts, tmp_path, number):
    out = tmp_path / "run"
    both = list(begin(hosts, out, ENDLESS, 26_030 + number))
    wait_until(lambda: last_step(out) >= 5, 120, "5 steps")
    os.kill(process_of(hosts[1]), number)
    asked = time.monotonic()
    assert [process.wait(timeout=60) for process in both] == [128 + number] * 2, said(out, hosts[0])
    sys.stdout.write(f"\nboth ended {time.monotonic() - asked:.1f} s after {number.name} to one\n")
    stopped = state(out)["step"]
    assert said(out, hosts[0]).count(f"stopped after step {stopped} of") == 1
    assert "stopped" not in said(out, hosts[1])  # one process talks
    assert last_step(out) == stopped


@pytest.mark.parametrize("how", ["killed", "stuck", "cut off"])
def test_nobody_waits_for_a_missing_process_longer_than_said(hosts, tmp_path, how):
    """The line that ends the other process names the missing one and its host."""
    out = tmp_path / "run"
    both = list(begin(hosts, out, ENDLESS, 26_060 + len(how)))
    wait_until(lambda: last_step(out) >= 5, 120, "5 steps")
    missing = process_of(hosts[1])
    if how == "cut off":
        hosts[1].cut()
    else:
        os.kill(missing, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    assert both[0].wait(timeout=TIMEOUT + LISTENING) == 75
    sys.stdout.write(f"\n{how}: the other ended after {time.monotonic() - began:.1f} s\n")
    line = said(out, hosts[0]).splitlines()[-1]
    assert line.startswith("error: process 0 (host tico-a) lost touch with the others: process 1 (host tico-b) has")
    assert "with --resume" in line
    if how == "cut off":  # this one cannot reach the place of meeting
        assert both[1].wait(timeout=TIMEOUT + LISTENING) == 75
        assert f"{hosts[0].name}:" in said(out, hosts[1]).splitlines()[-1]
    with suppress(ProcessLookupError):
        os.kill(missing, signal.SIGKILL)
