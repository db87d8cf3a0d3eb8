"""The packed file against numpy's: the same images as .tico and as .npy, random access.

    python benchmarks/packed.py [--images 4096] [--folder FOLDER] [--out FILE]

Batches of 256 images are read in random order, each image once per pass, from a memory-mapped file into the process's
memory, by one thread. Both files have just been written, so they are in the page cache: the first pass maps their
pages, later ones find them mapped. A cold disk limits both alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.formats.packed import open_packed, verify_packed
from tico_ssl.pipeline.packing import pack
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import keep_freed_memory

BATCH, SIZES, ROUNDS, OPENINGS = 256, (224, 256), 7, 21

Take = Callable[[Tensor], Tensor]


def open_tico(path: Path) -> Take:
    """Images and labels; all checksums but those of the pixels are verified."""
    return open_packed(path).take


def open_npy(path: Path) -> Take:
    """The same by numpy, as a tensor over the mapped file; labels are in a second file."""
    images = torch.from_numpy(np.load(path, mmap_mode="c"))
    torch.from_numpy(np.load(path.with_suffix(".labels.npy")))
    return images.__getitem__


def write(folder: Path, count: int, size: int) -> tuple[Path, Path]:
    """Both files."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 1000
    tico, npy = folder / f"{size}.tico", folder / f"{size}.npy"
    pack(from_arrays("noise", images, labels), tico, size)
    np.save(npy, images.numpy())
    np.save(npy.with_suffix(".labels.npy"), labels.numpy())
    return tico, npy


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock time of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def one_pass(take: Take, order: Tensor) -> float:
    """Images per second."""

    def read() -> None:
        for places in order.split(BATCH):
            take(places)

    return len(order) / seconds_of(read)


def compare(folder: Path, count: int, size: int) -> list[dict[str, Any]]:
    """One line per format. Passes alternate, so that other load on the machine affects both."""
    files = dict(zip(("tico", "npy"), write(folder, count, size)))
    openers: dict[str, Callable[[Path], Take]] = {"tico": open_tico, "npy": open_npy}
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    takes = {form: openers[form](path) for form, path in files.items()}
    assert torch.equal(takes["tico"](order[:BATCH]), takes["npy"](order[:BATCH]))
    opening = {
        form: statistics.median(seconds_of(partial(openers[form], path)) for _ in range(OPENINGS))
        for form, path in files.items()
    }
    passes: dict[str, list[float]] = {form: [] for form in files}
    takes = {form: openers[form](path) for form, path in files.items()}  # opened again: the first pass maps the pages
    for _ in range(1 + ROUNDS):
        for form, take in takes.items():
            passes[form].append(one_pass(take, order))
    verifying = seconds_of(partial(verify_packed, files["tico"]))
    extra = {"tico": {"seconds_to_verify": round(verifying, 2)}, "npy": {}}
    sizes = {"tico": files["tico"].stat().st_size}
    sizes["npy"] = sum(path.stat().st_size for path in folder.glob(f"{size}*.npy"))
    return [
        {
            "form": form,
            "images": count,
            "size": size,
            "milliseconds_to_open": round(1e3 * opening[form], 3),
            "images_per_second_first_pass": round(passes[form][0]),
            "images_per_second_best": round(max(passes[form][1:])),
            "images_per_second_median": round(statistics.median(passes[form][1:])),
            "bytes": sizes[form],
            **extra[form],
        }
        for form in files
    ]


def main() -> None:
    """Print one JSON line for each size and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="temporary files go here, by default to the system's folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `tico pretrain` does: batches come and go
    lines: list[dict[str, Any]] = [{"machine": environment(), "threads": torch.get_num_threads()}]
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            lines += compare(Path(folder), arguments.images, size)
        for line in lines[-2:]:
            print(json.dumps(line), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
