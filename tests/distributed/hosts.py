"""Two hosts on one machine: network namespaces, joined by a virtual cable, each with a name of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CABLE = "tico0"


class Host:
    """A namespace of networks and names, and the processes in it."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        self.name, self.address, self.names = name, address, names
        self.space = f"{name}-{os.getpid()}"
        self.started: list[subprocess.Popen] = []

    def start(self, log: Path, *command: str, **environment: str) -> subprocess.Popen:
        """Start a command on this host."""
        alone = 'mount --bind "$1" /etc/hosts && hostname "$0" && shift && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", alone, self.name, str(self.names), *command]
        settings = {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1", "TICO_DEVICE": "cpu"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *inside],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | settings | environment,
            )
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """Everything that runs here."""
        return [int(word) for word in ip("netns", "pids", self.space).split()]

    def cut(self) -> None:
        """Pull the cable: nothing that is sent arrives, and nobody is told."""
        ip("-n", self.space, "link", "set", CABLE, "down")

    def join(self) -> None:
        """Plug the cable in."""
        ip("-n", self.space, "link", "set", CABLE, "up")

    def kill(self) -> None:
        """End everything that runs here, at once."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for one in self.started:
            one.wait()


def ip(*words: str) -> str:
    """A command of iproute2."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def obstacle() -> str | None:
    """Why there can be no such hosts here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no `{program}` (iproute2, util-linux)"
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are refused: {getattr(error, 'stderr', '') or error}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Within, two hosts that see each other."""
    names = Path(tempfile.mkstemp(prefix="hosts-")[1])
    hosts = Host("tico-a", "10.199.77.1", names), Host("tico-b", "10.199.77.2", names)
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
    try:
        for host in hosts:
            ip("netns", "add", host.space)
        ends = [word for host in hosts for word in ("name", CABLE, "netns", host.space)]
        ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for host in hosts:
            ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", CABLE)
            ip("-n", host.space, "link", "set", "lo", "up")
            host.join()
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
                ip("netns", "delete", host.space)
        names.unlink()


def wait_until(condition: Callable[[], bool], seconds: float, what: str = "") -> float:
    """Wait for something; returns for how long."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.05)
    return time.monotonic() - begun
