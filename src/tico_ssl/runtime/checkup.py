"""What this machine offers for training, and what is missing: a line each, for `tico doctor`. No network is used."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tico_ssl.runtime import cache_folder
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import EXTRAS, PACKAGE, install_command
from tico_ssl.runtime.memory import free_memory
from tico_ssl.runtime.wording import counted

LITTLE_MEMORY = 2 * 2**30  # bytes
LITTLE_DISK = 2**30
DRIVER = Path("/proc/driver/nvidia/version")
SHARED = Path("/dev/shm")
COMPILERS = ("gcc", "cc", "clang")


@dataclass(frozen=True)
class Finding:
    """One line: what it is about, what there is, and what to do, if anything. Without what is `needed`, training
    cannot run."""

    about: str
    text: str
    remedy: str = ""
    needed: bool = False

    def line(self) -> str:
        """As it is printed."""
        return f"{self.about:<10} {self.text}" + (f": {self.remedy}" if self.remedy else "")

    @property
    def prevents(self) -> bool:
        """Whether training cannot run because of it."""
        return self.needed and bool(self.remedy)


def examine() -> list[Finding]:
    """All findings; the last is whether training can run here."""
    found = [_python(), *_libraries()]
    torch, problem = _torch()
    found.append(problem)
    if torch is not None:
        found += [*_gpus(torch), _kernels(torch), _cores(torch)]
    found += [_memory(), *_disks(), *_shared_memory(), *_extras()]
    if torch is not None and not any(one.prevents for one in found):
        found.append(_attempt(torch))
    return [*found, _verdict(found)]


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()}, {sys.executable}")


def _libraries() -> Iterator[Finding]:
    """The package and what it depends on, by the versions that it declares."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        yield Finding(PACKAGE, "not installed, but used from its folder")
        return
    yield Finding(PACKAGE, metadata.version(PACKAGE))
    for text in required:
        if "extra ==" not in text and (wrong := _unmet(text)):
            yield Finding("library", wrong, f"pip install '{text}'", needed=True)


def _unmet(requirement: str) -> str:
    """Why a requirement such as torch>=2.11 is not met; empty if it is."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    least = re.search(r">=\s*([\d.]+)", requirement)
    return "" if least is None or _numbers(version) >= _numbers(least[1]) else f"{name} {version} is too old"


def _numbers(version: str) -> list[int]:
    found = re.match(r"[\d.]*", version)
    return [int(part) for part in (found[0] if found else "").split(".") if part]


def _torch() -> tuple[Any, Finding]:
    """The library, if it can be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # also a shared library that is missing
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, Finding("torch", f"cannot be imported ({reason})", "install it, see pytorch.org", needed=True)
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    build = f"for ROCm {torch.version.hip}" if getattr(torch.version, "hip", None) else build
    return torch, Finding("torch", f"{torch.__version__}, built {build}")


def _gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        driver = DRIVER.is_file()
        if driver and torch.version.cuda is None:
            yield Finding("gpu", "not usable", "this torch is built for CPUs; install one for CUDA, see pytorch.org")
        elif driver:
            why = f"CUDA {torch.version.cuda} may need a newer driver, or CUDA_VISIBLE_DEVICES may hide the GPU"
            yield Finding("gpu", "there is a driver, but torch finds no GPU", why)
        else:
            yield Finding("gpu", "none; training runs on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        memory = f"{total / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} free"
        yield Finding("gpu", f"{number}: {about.name}, {memory}, capability {about.major}.{about.minor}")


def _kernels(torch: Any) -> Finding:
    """What is compiled on this machine: kernels of views and BatchNorm on a GPU, steps with torch.compile anywhere."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    missing = [
        remedy
        for there, remedy in (
            (find_spec("triton") is not None, "pip install triton"),
            (compiler is not None, "install a C compiler (gcc)"),
            (headers, "install Python's headers (python3-dev)"),
        )
        if not there
    ]
    if not missing:
        return Finding(
            "kernels", f"Triton, Python's headers and {compiler} are there: kernels and steps can be compiled"
        )
    loss = "steps are slower" if torch.cuda.is_available() else "which only training.execution=compiled needs"
    return Finding("kernels", f"cannot be compiled, {loss}", ", ".join(missing))


def _cores(torch: Any) -> Finding:
    from tico_ssl.runtime.device import has_bf16

    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bf16 = "bf16 is faster here" if has_bf16(torch.device("cpu")) else "bf16 is not faster here"
    threads = counted(torch.get_num_threads(), "thread")
    text = f"{mine} of {counted(os.cpu_count() or 1, 'core')} usable, torch takes {threads}; {bf16}"
    return Finding("cpu", text)


def _memory() -> Finding:
    free = free_memory()
    remedy = "close other programs; small batches may still fit" if 0 < free < LITTLE_MEMORY else ""
    return Finding("memory", f"{free / 2**30:,.1f} GiB free" if free else "unknown", remedy)


def _disks() -> Iterator[Finding]:
    """Of the current folder, where runs/ is written, and of the cache of decoded images."""
    places = [("folder", Path.cwd(), True)]
    try:
        places.append(("cache", cache_folder.cache_folder(), False))
    except OSError as error:
        yield Finding("cache", "none", str(error.strerror), False)
    for about, folder, needed in places:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        text = f"{folder}, {free / 1e9:,.1f} GB free"
        if os.access(existing, os.W_OK):
            yield Finding(about, text, "free some space" if free < LITTLE_DISK else "")
        else:
            remedy = "work in another folder, or give --out" if needed else f"set {cache_folder.VARIABLE}"
            yield Finding(about, f"{text}, not writable", remedy, needed)


def _shared_memory() -> Iterator[Finding]:
    with suppress(OSError):
        size = shutil.disk_usage(SHARED).total
        yield Finding(
            "shared", f"{SHARED} of {size / 1e9:,.2f} GB, which is not needed: workers have memory of their own"
        )


def _extras() -> Iterator[Finding]:
    for name, extra in EXTRAS.items():
        missing = extra.missing()
        state = f"{' and '.join(missing)} not installed" if missing else "installed"
        yield Finding("extra", f"{name} ({extra.purpose}), {state}", install_command(name) if missing else "")


def _attempt(torch: Any) -> Finding:
    """A product and its gradient where training would compute: a GPU may be too old for this torch, or in use."""
    from tico_ssl.runtime.device import choose_device, resolve_precision

    try:
        device = choose_device()
        weights = torch.ones(8, 8, device=device, requires_grad=True)
        (weights @ weights).sum().backward()
        weights.grad.sum().item()
        precision = str(resolve_precision("auto", device)).removeprefix("torch.")
    except (RuntimeError, UserError) as error:
        reason = str(error).splitlines()[0]
        return Finding("device", f"cannot compute ({reason})", "TICO_DEVICE=cpu uses the CPU instead", needed=True)
    return Finding("device", f"{device}, {precision}" + (" (TICO_DEVICE)" if os.environ.get("TICO_DEVICE") else ""))


def _verdict(found: list[Finding]) -> Finding:
    if reasons := [one.about for one in found if one.prevents]:
        return Finding("result", "training cannot run here", f"see {', '.join(dict.fromkeys(reasons))}", needed=True)
    return Finding("result", "training can run here")
