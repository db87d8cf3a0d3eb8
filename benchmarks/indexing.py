"""A folder of a million files: time to open it, and memory of the file list.

    python benchmarks/indexing.py [--files 1000000] [--out FILE]

The files are empty, in a temporary folder (inside --folder). They are new, so the operating system has the folders in
its cache: a first scan of a slow disk takes longer.
"""

import argparse
import gc
import json
import multiprocessing
import random
import re
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tico_ssl.data.formats.folder import open_folder
from tico_ssl.data.source import Source
from tico_ssl.results.run_folder import environment

FOLDERS, LOOKUPS = 1_000, 100_000


def make_files(root: Path, count: int) -> None:
    """Empty files in many nested folders, so that the folders are not classes."""
    folders = [root / "part" / f"{number:04d}" for number in range(min(FOLDERS, count))]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(count):
        (folders[number % len(folders)] / f"image_{number:09d}.jpg").touch()


def memory(*kinds: str) -> int:
    """Bytes of this process, summed over Linux's kinds of memory."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(kilobytes) for kind, kilobytes in re.findall(r"(\w+): +(\d+) kB", text) if kind in kinds)


def look_up(source: Source, answer: Connection) -> None:
    """Growth of a worker's private memory while it looks up the names of random indices."""
    before = memory("Private_Clean", "Private_Dirty")
    places = random.Random(0)
    for _ in range(LOOKUPS):
        source.names(places.randrange(len(source)))
    answer.send(memory("Private_Clean", "Private_Dirty") - before)


def growth_of_a_worker(source: Source) -> int:
    """Bytes that a forked worker copies or adds by looking up names."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=look_up, args=(source, theirs))
    worker.start()
    worker.join()
    if worker.exitcode:
        raise SystemExit(f"the worker ended with {worker.exitcode}")
    return int(ours.recv())


def measure(root: Path) -> dict[str, float]:
    """Open a folder: time and memory."""
    gc.collect()
    before, start = memory("Rss"), time.perf_counter()
    source = open_folder(root, "train")
    seconds = time.perf_counter() - start
    gc.collect()
    assert source is not None
    return {
        "files": len(source),
        "seconds": round(seconds, 2),
        "seconds_per_100000": round(1e5 * seconds / len(source), 3),
        "resident_growth_mib": round((memory("Rss") - before) / 2**20, 1),
        "worker_private_growth_mib": round(growth_of_a_worker(source) / 2**20, 2),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="temporary files go here, by default to the system's folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        make_files(Path(root), arguments.files)
        figures = measure(Path(root))
    line = json.dumps({"machine": environment()} | figures)
    print(line)
    if arguments.out:
        arguments.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
