"""Start-up time of light commands, and the large libraries that they import.

    python benchmarks/startup.py [--source DIR] [--label TEXT] [--times 7] [--out FILE]

Every command is a new process. Reported are wall-clock seconds and CPU seconds, which do not depend on other load on
the machine; medians over several processes. `--source` is a `src` folder to measure instead of the installed package,
such as that of another version.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("numpy", "torch", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "plotly", "tensorboard")
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pydantic", "typer", "rich")

TINY = (
    "data.limit=32 training.batch_size=16 training.epochs=1 training.knn_every_epochs=0 backbone.name=tico/resnet10-w4"
)

COMMANDS = {
    "tico --help": ["-m", "tico_ssl", "--help"],
    "tico list methods": ["-m", "tico_ssl", "list", "methods"],
    "tico list recipes": ["-m", "tico_ssl", "list", "recipes"],
    "tico describe cifar10/tico": ["-m", "tico_ssl", "describe", "cifar10/tico"],
    "tico describe methods-cifar10": ["-m", "tico_ssl", "describe", "methods-cifar10"],
    "tico compare RUN": ["-m", "tico_ssl", "compare", "run"],
    "tico pretrain nosuch": ["-m", "tico_ssl", "pretrain", "nosuch"],
    "tico evaluate RUN nosuch": ["-m", "tico_ssl", "evaluate", "run", "nosuch"],
    "import tico_ssl": ["-c", "import tico_ssl"],
    "from tico_ssl import pretrain": ["-c", "from tico_ssl import pretrain"],
    "from tico_ssl import TiCoLoss": ["-c", "from tico_ssl import TiCoLoss"],
}

WATCHED = """
import atexit, json, sys
names, file, arguments = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
atexit.register(lambda: open(file, "w").write(json.dumps([name for name in names if name in sys.modules])))
if arguments[0] == "-c":
    exec(arguments[1])
else:
    sys.argv = ["tico", *arguments[2:]]
    from tico_ssl.cli import main
    main()
"""


class Place:
    """A working folder with a small run in it, and the environment that selects the package."""

    def __init__(self, folder: Path, source: Path | None) -> None:
        self.folder = folder
        self.environment = dict(os.environ)
        if source is not None:
            self.environment["PYTHONPATH"] = str(source.resolve())
        self.python("-m", "tico_ssl", "pretrain", "demo", *TINY.split(), "--out", "run", expected=(0,))

    def python(self, *arguments: str, expected: tuple[int, ...] = (0, 2)) -> None:
        """Run Python; a user error has exit code 2."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        if done.returncode not in expected:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")

    def timed(self, arguments: list[str]) -> tuple[float, float]:
        """Wall-clock and CPU seconds."""
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        self.python(*arguments)
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def imported(self, arguments: list[str]) -> list[str]:
        """The large libraries that a command imports."""
        answer = self.folder / "imported.json"
        self.python("-c", WATCHED, json.dumps(LIBRARIES), str(answer), *arguments)
        found: list[str] = json.loads(answer.read_text())
        return found


def measure(place: Place, name: str, times: int) -> dict[str, Any]:
    """One command, after a warm-up that fills the caches of the operating system."""
    arguments = COMMANDS[name]
    libraries = place.imported(arguments)
    measured = [place.timed(arguments) for _ in range(times)]
    clock, processor = zip(*measured)
    return {
        "command": name,
        "seconds": round(statistics.median(clock), 3),
        "fastest_seconds": round(min(clock), 3),
        "processor_seconds": round(statistics.median(processor), 3),
        "libraries": libraries,
    }


def machine() -> dict[str, Any]:
    """The machine and its software."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def main() -> None:
    """Measure all commands, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a src folder, instead of the installed package")
    parser.add_argument("--label", default="", help="what is measured, for the log")
    parser.add_argument("--times", type=int, default=7, help="processes per command")
    parser.add_argument("--out", type=Path, help="where to write JSON lines")
    arguments = parser.parse_args()
    lines = [{"label": arguments.label, "times": arguments.times, "machine": machine()}]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), arguments.source)
        print(f"{'command':<32} {'s':>7} {'fastest':>8} {'CPU s':>7}  libraries")
        for name in COMMANDS:
            line = measure(place, name, arguments.times)
            lines.append(line)
            figures = f"{line['seconds']:>7.2f} {line['fastest_seconds']:>8.2f} {line['processor_seconds']:>7.2f}"
            print(f"{name:<32} {figures}  {' '.join(line['libraries']) or '-'}", flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
