"""What started this process as one of several: torchrun, SLURM's srun, or nobody. Nothing here imports torch.

Launchers speak by environment variables. Those of torchrun (RANK, WORLD_SIZE, ...) are the ones that the package reads;
those of srun are put into the same words.
"""

import math
import os
import re
from collections.abc import MutableMapping

from tico_ssl.runtime.errors import UserError

TIMEOUT = "TICO_TIMEOUT"
TIMEOUT_SECONDS = 600.0
FIRST_PORT, PORTS = 20_000, 10_000  # in which a job's processes meet: below those that the system hands out


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    """The rank of this process among them."""
    return int(os.environ.get("RANK", "0"))


def restarts() -> int:
    """How often torchrun may start the processes again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def timeout_seconds() -> float:
    """How long a process waits for the others before it gives up: TICO_TIMEOUT."""
    text = os.environ.get(TIMEOUT, str(TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 1e6:
        raise UserError(f"{TIMEOUT}={text}: seconds that processes wait for each other, from 1 to 1000000")
    return seconds


def adopt_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Put the variables of a step that srun started as several tasks into the words of torchrun. A shell or a batch
    script inside a job is no such step; processes of torchrun have theirs already."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or tasks == "1":
        return
    job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    node, nodes = int(environment.get("SLURM_NODEID", "0")), environment.get("SLURM_STEP_NODELIST", "localhost")
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], tasks
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    here = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))[node]
    environment["LOCAL_WORLD_SIZE"] = str(here)
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 1_009 * step) % PORTS))


def first_host(nodes: str) -> str:
    """The first of a list of hosts as SLURM writes it: gpu007 of gpu[007-010,12],cpu1."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodes}: not a list of hosts")
    return "".join(part or "" for part in found.groups())


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node as SLURM writes them: 4, 4, 2 of 4(x2),2."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts
