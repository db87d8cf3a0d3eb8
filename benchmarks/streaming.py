"""JPEG loading: throughput of worker processes as a fraction of bare loops on the same processors.

    python benchmarks/streaming.py [--workers 2] [--images 1000] [--photos FOLDER] [--out FILE]

The files are 500 x 375 JPEGs (quality 92) of the photos of a folder, or of synthetic textures with noise. Bare loops
have the same number of processes, each calling the same functions on its share of the files and dropping the results.
The loader and the bare loops alternate; the best of several rounds counts. The loader's first pass over the files is
a warm-up.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tico_ssl.config.recipe import load_recipe
from tico_ssl.config.sections import DataConfig
from tico_ssl.data.bad_files import BadFiles
from tico_ssl.data.codecs import decoder_of
from tico_ssl.data.formats.textures import draw_textures
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.pipeline.streaming import Prepare, Stream, Task
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.randomness import generator
from tico_ssl.views.executor import Views

WIDTH, HEIGHT, QUALITY = 500, 375, 92
BATCH, ROUNDS, PASSES = 256, 3, 8


def pictures(photos: Path | None) -> Iterator[Image.Image]:
    """Photos, repeated, or textures with noise, which cost about as much to decode."""
    files = sorted(path for path in photos.rglob("*.jpg")) if photos else []
    textures = draw_textures(64, HEIGHT, seed=0)[0].permute(0, 2, 3, 1).numpy()
    noise = np.random.default_rng(0)
    number = 0
    while True:
        if files:
            yield Image.open(files[number % len(files)]).convert("RGB")
        else:
            yield Image.fromarray(
                (textures[number % 64] + noise.normal(0, 8, textures[0].shape)).clip(0, 255).astype("u1")
            )
        number += 1


def write_files(folder: Path, count: int, photos: Path | None) -> None:
    """The JPEGs to read."""
    for number, picture in zip(range(count), pictures(photos)):
        picture.resize((WIDTH, HEIGHT)).save(folder / f"{number:05d}.jpg", quality=QUALITY)


def bare(source: Source, prepare: Prepare, parameters: np.ndarray, workers: int) -> float:
    """Images per second of loops in as many processes, which drop their results."""

    def loop(places: range) -> None:
        torch.set_num_threads(1)
        for place in [*places] * PASSES:
            prepare(source.fetch(place), torch.from_numpy(parameters[place]))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=loop, args=(range(w, len(source), workers),)) for w in range(workers)]
    return _rate(PASSES * len(source), lambda: [*map(_start, processes), *map(_join, processes)])


def streamed(source: Source, prepare: Prepare, parameters: np.ndarray, workers: int, size: int) -> float:
    """Images per second that arrive in the main process, in batches."""
    stream = Stream(source, prepare, size, BATCH, workers, torch.device("cpu"), BadFiles())
    assert stream.processes, stream.name
    steps = len(source) // BATCH
    order = np.random.default_rng(0).permutation(len(source))[: steps * BATCH].reshape(steps, BATCH)
    tasks = [Task(places, parameters[places]) for places in order] * (PASSES + 1)
    batches = stream.batches(tasks)
    for _ in zip(range(steps), batches):  # warm-up: processes start, memory is allocated
        pass
    return _rate(PASSES * steps * BATCH, lambda: sum(1 for _ in batches))


def _rate(count: int, work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def _start(process: Any) -> None:
    process.start()


def _join(process: Any) -> None:
    process.join()


def compare(source: Source, workers: int) -> Iterator[dict[str, Any]]:
    """Whole images, and images with two crops of 224 pixels."""
    views = Views(load_recipe("imagenet/tico").views, 224, (0.5,) * 3, (0.5,) * 3)
    parameters = views.draw(len(source), generator(0, "views", 0))[..., : views.place.width].numpy()
    kinds: dict[str, tuple[Prepare, int]] = {
        "decode": (lambda image, _: (image,), 3 * WIDTH * HEIGHT),
        "decode and cut two crops of 224 px": (views.crop_bytes, views.bytes_per_image),
    }
    for name, (prepare, size) in kinds.items():
        alone, handed = 0.0, 0.0
        for _ in range(ROUNDS):
            alone = max(alone, bare(source, prepare, parameters, workers))
            handed = max(handed, streamed(source, prepare, parameters, workers, size))
        share = round(handed / alone, 3)
        yield {"what": name, "bare_images_per_second": round(alone), "streamed": round(handed), "share": share}


def main() -> None:
    """Print one JSON line for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    decoder = "torchcodec" if "torchcodec" in getattr(decoder_of("jpeg"), "__qualname__", "") else "torchvision"
    lines: list[dict[str, Any]] = [
        {"machine": environment(), "decoder": decoder, "workers": arguments.workers, "images": arguments.images}
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), arguments.images, arguments.photos)
        mean = sum(path.stat().st_size for path in Path(folder).iterdir()) / arguments.images
        lines[0] |= {"photos": arguments.photos is not None, "bytes_per_file": round(mean)}
        for line in compare(open_training(DataConfig(source=folder)), arguments.workers):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
