"""A SLURM cluster of one machine, of Debian's packages, in a folder of its own: no service, no cgroups."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CPUS = 2
CONF = """ClusterName=tico
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
"""


def obstacle() -> str | None:
    """Why there can be no such cluster here."""
    if os.name != "posix" or os.geteuid() != 0:
        return "a cluster of one's own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)} (apt install slurmctld slurmd slurm-client munge)" if missing else None


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Within, the commands of SLURM speak to this cluster: partition high takes the place of jobs in low."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    ports = {"port": free_port(), "other_port": free_port()}
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname().partition(".")[0], cpus=CPUS, **ports))
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    try:
        run("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files)
        run("slurmctld", "-f", str(conf))
        run("slurmd", "-f", str(conf))
        wait_until(lambda: "idle" in run("sinfo", "--noheader"), 60, "an idle node")
        yield
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            run("scancel", "--user=root")
            wait_until(lambda: not run("squeue", "--noheader"), 40, "the end of all jobs")
        for name in ("slurmd", "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                os.kill(int((folder / f"{name}.pid").read_text()), 15)
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*words: str) -> str:
    """A command that must succeed; what it says."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def job_field(job: str, name: str) -> str:
    """A field of a job, such as JobState."""
    found = [word for word in run("scontrol", "show", "--oneliner", "job", job).split() if word.startswith(f"{name}=")]
    return found[0].partition("=")[2]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for something; returns for how long."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - begun
