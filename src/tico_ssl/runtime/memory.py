"""How much memory is free."""

import sys
from contextlib import suppress
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
GROUP_FILES = (  # of either version: limit, use, and what of it is cached files
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that this process can still use: of the machine, of its control group, and of its own
    limit, where they have one."""
    free = 0
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    for limit_file, used_file, cached in GROUP_FILES:
        with suppress(OSError, ValueError, KeyError):  # no such control group, or no limit ("max")
            limit, used = (int((GROUP / name).read_text()) for name in (limit_file, used_file))
            held = dict(line.split() for line in (GROUP / used_file).with_name("memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(held[cached]))  # what is cached gives way
    return max(0, min(free, _address_space()))


def _address_space() -> int:
    """What is left of this process's limit (ulimit -v)."""
    with suppress(ImportError, OSError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            return most - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return sys.maxsize
