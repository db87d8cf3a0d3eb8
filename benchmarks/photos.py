"""A folder of photos against the same photos packed into one file: how long training waits for images.

    python benchmarks/photos.py FOLDER [KEY=VALUE ...] [--size 112] [--epochs 6] [--evaluate] [--out FILE]

Trains recipe `photos` on the packed file, on the folder with an empty store, and on the folder with a full one, each in
a process of its own: a later training in the same process is slower. Bare decoding is that of as many processes as
training has workers, which decode all files once and drop the pixels; the loader's first epoch, without a network, is
compared with it, with the start of its processes and once the first batch is there. Memory is the proportional set size
of a training and its workers, so shared pages count once; files that the system caches are not in it. `--evaluate` also
times `tico evaluate RUN knn linear`, in processes of its own: with the store of training, with its features, and with
nothing kept.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tico_ssl.config.recipe import Recipe, load_recipe, parse_override
from tico_ssl.config.sections import DataConfig
from tico_ssl.config.views import shorter_side
from tico_ssl.data.decoding import BadImage
from tico_ssl.data.ragged import Ragged
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.pipeline.packing import pack
from tico_ssl.pipeline.workers import ahead, default_workers
from tico_ssl.results.run_folder import Run, environment
from tico_ssl.runtime.device import choose_device
from tico_ssl.training.setup import prepare
from tico_ssl.views.executor import crops_ragged


def main() -> None:
    """Print, and write, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--size", type=int, default=112, help="shorter side of the packed images")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = dict(map(parse_override, arguments.overrides)) | {"training.epochs": arguments.epochs}
    settings |= {"training.knn_every_epochs": 0, "optimizer.warmup_epochs": 1.0, "training.checkpoint_seconds": 1e6}
    lines: list[dict[str, Any]] = [{"machine": environment(), "settings": settings}]
    with tempfile.TemporaryDirectory() as place:
        os.environ["TICO_CACHE"] = f"{place}/cache"
        for line in measured(arguments.folder, Path(place), settings, arguments.size, arguments.evaluate):
            lines.append(line)
            print(json.dumps(line), flush=True)
            if arguments.out:
                arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def measured(
    folder: Path, place: Path, settings: dict[str, Any], size: int, evaluate: bool
) -> Iterator[dict[str, Any]]:
    """All measurements, one after the other."""
    recipe = load_recipe("photos", settings | {"data.source": str(folder)})
    shorter, config = shorter_side(recipe.views, recipe.data.image_size), DataConfig(source=str(folder))
    chosen = open_training(config.model_copy(update={"limit": recipe.data.limit}), shorter=shorter)
    pack(chosen, place / "photos.tico", size, workers=default_workers())
    settings = {key: value for key, value in settings.items() if key != "data.limit"}
    packed = trained("packed", place / "photos.tico", place, settings)
    yield packed
    bare = paced(decoding(chosen, default_workers()))
    yield {"what": "bare decoding", "processes": default_workers()} | bare
    first = paced(loading(recipe, chosen))
    ratios = {f"{key}_to_bare": round(first[key] / bare[key], 3) for key in ("images_per_second", "once_begun")}
    yield {"what": "loader, first epoch"} | first | ratios
    shutil.rmtree(place / "cache")
    limit = {} if recipe.data.limit is None else {"data.limit": recipe.data.limit}
    for name in ("files, empty store", "files, full store"):
        line = trained(name, folder, place, settings | limit)
        yield line | {
            "later_to_packed": round(line["later"] / packed["later"], 3),
            "memory_beyond_packed_mb": line["memory_mb"] - packed["memory_mb"],
        }
    if evaluate:
        yield from evaluated(place / "files, full store", place)


def trained(name: str, data: Path, place: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Images per second in the first epoch and in later ones, and the share of time that these waited for images."""
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "tico_ssl", "pretrain", "photos", "--data", str(data), "--out", str(place / name)]
    with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(proportional, family(process.pid))))
            time.sleep(0.3)
    run = Run(place / name)
    speeds = epochs(run)
    later = [line["data_wait"] for line in run.metrics() if "data_wait" in line and line["epoch"] > 1]
    said = (run.folder / "train.log").read_text(encoding="utf-8").splitlines()[0].split(": ", 1)[-1]
    return {
        "what": name,
        "first": round(speeds[0], 1),
        "later": round(statistics.median(speeds[1:]), 1),
        "waiting": round(statistics.mean(later), 4),
        "memory_mb": peak // 10**6,
        "said": said,
    }


def epochs(run: Run) -> list[float]:
    """Images per second of each epoch, by the clock of training, which begins before the first batch."""
    images = load_recipe(str(run.recipe_file)).training.batch_size
    ends = [line for line in run.metrics() if "seconds" in line and float(line["epoch"]).is_integer()]
    begin, speeds = {"step": 0, "seconds": 0.0}, []
    for end in ends:
        speeds.append(images * (end["step"] - begin["step"]) / (end["seconds"] - begin["seconds"]))
        begin = end
    return speeds


def paced(parts: Iterable[int]) -> dict[str, float]:
    """Images per second, all in all and after the first part, which contains the start of processes."""
    begin, first, done, last = time.perf_counter(), None, 0, 0.0
    for images in parts:
        done, last = done + images, time.perf_counter()
        first = first or (images, last)
    assert first is not None
    end = time.perf_counter()
    return {
        "first_after": round(first[1] - begin, 3),
        "after_the_last": round(end - last, 3),
        "images_per_second": round(done / (end - begin), 1),
        "once_begun": round((done - first[0]) / (last - first[1]), 1),
    }


def decoding(source: Source, processes: int) -> Iterator[int]:
    """Numbers of images that processes have decoded."""

    def decode(places: range) -> int:
        for at in places:
            with suppress(BadImage):
                source.fetch(at)
        return len(places)

    return ahead(decode, [range(at, min(at + 16, len(source))) for at in range(0, len(source), 16)], processes)


def loading(recipe: Recipe, source: Source) -> Iterator[int]:
    """The same of the loader in the first epoch, with an empty store. Its kernels are compiled before: a training does
    that while its processes decode."""
    loader = prepare(recipe, choose_device(), source).loader
    if crops_ragged(loader.device):
        blank = Ragged.of([torch.zeros(3, 112, 112, dtype=torch.uint8)] * loader.batch_size)
        loader._cropped(0, loader.indices(0), blank.to(loader.device), blank.sizes.float())
        torch.cuda.synchronize()
    for _ in loader.iterate(0, loader.steps_per_epoch):
        yield loader.batch_size


def evaluated(run: Path, place: Path) -> Iterator[dict[str, Any]]:
    """Seconds of whole commands."""
    yield {"what": "import torch, torchvision", "seconds": seconds("-c", "import torch, torchvision")}
    command = ("-m", "tico_ssl", "evaluate", str(run), "knn", "linear", "--again")
    for what in ("with the store of training", "with its features"):
        yield {"what": f"evaluate knn linear, {what}", "seconds": seconds(*command)}
    shutil.rmtree(run / "features")
    os.environ["TICO_CACHE"] = f"{place}/other-cache"
    yield {"what": "evaluate knn linear, nothing kept", "seconds": seconds(*command)}


def seconds(*words: str) -> float:
    """How long a Python process takes."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - begin, 2)


def family(process: int) -> list[int]:
    """A process and its children."""
    with suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
        return [process, *map(int, children.split())]
    return []


def proportional(process: int) -> int:
    """Bytes of memory, shared ones in proportion."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


if __name__ == "__main__":
    main()
