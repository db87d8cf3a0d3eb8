"""Two BYOL views per image: this package against lightly and torchvision, in one run.

    python benchmarks/views.py [--out FILE]                  # one CPU thread; lightly is measured when it is installed
    python benchmarks/views.py --device cuda [--out FILE]    # the batched executor only, by kernels and by operations

Each library starts as in a training script: this package with a decoded uint8 batch, the others with PIL images, one at
a time. The best of several alternating rounds counts. On a GPU the images are in its memory, random numbers are drawn
on the CPU before the clock starts, and the median of many calls between two events counts; the throughput of a loop
that draws for every call is reported too.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from tico_ssl.config.recipe import load_recipe
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import keep_freed_memory
from tico_ssl.runtime.randomness import generator
from tico_ssl.views import executor
from tico_ssl.views.executor import Views, sizes_of

ROUNDS, SECONDS = 5, 2.0


def ours(images: Tensor, size: int, blur: bool) -> Callable[[], int]:
    """The batched executor."""
    policy = load_recipe("demo", {"views": "byol" if blur else "byol-small"}).views
    views = Views(policy, size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = iter(range(10**9))

    def run() -> int:
        views(images, views.draw(len(images), generator(0, "views", next(steps))))
        return 2 * len(images)

    return run


def torchvision_v2(pictures: list[Image.Image], size: int, blur: bool) -> Callable[[], int]:
    """The same policy written with torchvision's transforms, per image."""

    def view(blur_probability: float, solarise: float) -> v2.Compose:
        steps = [
            v2.RandomResizedCrop(size, scale=(0.08, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            *(
                [v2.RandomApply([v2.GaussianBlur(2 * (size // 20) + 1, (0.1, 2.0))], p=blur_probability)]
                if blur
                else []
            ),
            v2.RandomSolarize(128, p=solarise),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
        return v2.Compose(steps)

    first, second = view(1.0, 0.0), view(0.1, 0.2)

    def run() -> int:
        for picture in pictures:
            first(picture), second(picture)
        return 2 * len(pictures)

    return run


def lightly(pictures: list[Image.Image], size: int, blur: bool) -> Callable[[], int]:
    """lightly's BYOLTransform, as its examples use it."""
    from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    settings = {"input_size": size} | ({} if blur else {"gaussian_blur": 0.0})
    transform = BYOLTransform(BYOLView1Transform(**settings), BYOLView2Transform(**settings))

    def run() -> int:
        for picture in pictures:
            transform(picture)
        return 2 * len(pictures)

    return run


def measure(sides: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Views per second of each side, the best of several rounds in turn."""
    best = dict.fromkeys(sides, 0.0)
    for _ in range(ROUNDS):
        for name, run in sides.items():
            run()
            views, start = 0, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                views += run()
            best[name] = max(best[name], views / (time.perf_counter() - start))
    return best


def on_gpu(source: int, size: int, count: int, blur: bool) -> dict[str, Any]:
    """Views per second of one GPU."""
    device = torch.device("cuda")
    policy = load_recipe("demo", {"views": "byol" if blur else "byol-small"}).views
    views = Views(policy, size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), torch.bfloat16)
    images = torch.randint(0, 256, (count, 3, source, source), dtype=torch.uint8, device=device)
    sizes = sizes_of(images)
    decisions = views.decide(views.draw(count, generator(0, "views", 0)), sizes).to(device)

    def make() -> None:
        views.finish(views.crop(images, decisions), decisions)

    def draw_and_make(step: int) -> None:
        decisions.copy_(views.decide(views.draw(count, generator(0, "views", step)), sizes))
        make()

    line: dict[str, Any] = {"from": source, "to": size, "batch": count, "blur": blur}
    assert executor.by_kernels(device)
    line["kernels"] = round(2 * count / _median_seconds(make))
    start = time.perf_counter()
    for step in range(100):
        draw_and_make(step)
    torch.cuda.synchronize()
    line["kernels, with the draws"] = round(200 * count / (time.perf_counter() - start))
    chosen, executor.by_kernels = executor.by_kernels, lambda device: False  # type: ignore[assignment]
    line["operations"] = round(2 * count / _median_seconds(make))
    executor.by_kernels = chosen
    return line


def _median_seconds(work: Callable[[], None], calls: int = 50) -> float:
    seconds = []
    for number in range(calls + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= 5:
            seconds.append(begin.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def main() -> None:
    """Print one JSON line per size, and a ratio to every other side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    lines = [{"machine": environment() | {"lightly": _version("lightly")}, "python": platform.python_version()}]
    lines += on_gpus() if arguments.device == "cuda" else on_one_thread()
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def on_gpus() -> Iterator[dict[str, Any]]:
    """Small images and large ones."""
    for source, size, count, blur in ((32, 32, 4096, False), (32, 32, 512, False), (256, 224, 512, True)):
        yield shown(on_gpu(source, size, count, blur))


def on_one_thread() -> Iterator[dict[str, Any]]:
    """Small images and large ones, with the ratio to every other side."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    for source, size, count, blur in ((32, 32, 128, False), (256, 224, 16, True)):
        images = torch.randint(0, 256, (count, 3, source, source), dtype=torch.uint8)
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        sides = {"tico_ssl": ours(images, size, blur), "torchvision": torchvision_v2(pictures, size, blur)}
        if _version("lightly") is not None:
            sides["lightly"] = lightly(pictures, size, blur)
        speed = measure(sides)
        ratios = {f"times {name}": round(speed["tico_ssl"] / value, 2) for name, value in speed.items()}
        rounded = {name: round(value) for name, value in speed.items()}
        yield shown({"from": source, "to": size, "blur": blur, "views_per_second": rounded} | ratios)


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """The line, printed."""
    print(json.dumps(line), flush=True)
    return line


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
