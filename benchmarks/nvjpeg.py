"""JPEGs decoded by the GPU (nvJPEG, by torchvision) against as many processes as there are CPU cores.

    python benchmarks/nvjpeg.py FOLDER [--rounds 5] [--out FILE]

Both decode whole images, the processes also such that are reduced on the way, which nvJPEG does not; they drop them.
The start of processes is not counted. How far the pixels of the two decoders differ is measured as well: a run that
changes its decoder on resume would not be the same run.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from tico_ssl.data.decoding import decode
from tico_ssl.pipeline.workers import ahead, default_workers
from tico_ssl.results.run_folder import environment

BATCHES = (1, 16, 64, 256)
PIECE, REPEATED = 16, 40  # images that a process decodes at a time, and how often all of them are decoded
SHORTER = 112  # pixels that crops need at least, when a decoder may reduce images on the way


def main() -> None:
    """Print, and write, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    contents = [path.read_bytes() for path in sorted(arguments.folder.rglob("*.jpg"))]
    lines: list[dict[str, Any]] = [
        {"machine": environment(), "images": len(contents), "bytes": sum(map(len, contents))}
    ]
    processes = default_workers()
    for shorter in (None, SHORTER):
        size = "whole" if shorter is None else f"no smaller than {shorter} px"
        rate = by_cpu(contents, processes, shorter)
        lines.append({"what": f"{processes} processes, {size}", "images_per_second": rate})
    if torch.cuda.is_available():
        tensors = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        for batch in BATCHES:
            rate = best(partial(by_gpu, tensors, batch), arguments.rounds, len(contents))
            lines.append({"what": f"nvJPEG, {batch} at a time", "images_per_second": rate})
        lines.append({"what": "difference of pixels"} | difference(contents, tensors))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


def best(work: Callable[[], None], rounds: int, images: int) -> float:
    """Images per second of the fastest round, after one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return round(images / min(seconds[1:]), 1)


def by_cpu(contents: list[bytes], processes: int, shorter: int | None) -> float:
    """Images per second by processes, once all of them have begun."""

    def several(places: range) -> int:
        for place in places:
            decode(contents[place % len(contents)], shorter=shorter)
        return len(places)

    pieces = [range(at, at + PIECE) for at in range(0, REPEATED * len(contents), PIECE)]
    finished = [time.perf_counter() for _ in ahead(several, pieces, processes)][2 * processes :]
    return round(PIECE * (len(finished) - 1) / (finished[-1] - finished[0]), 1)


def by_gpu(tensors: list[torch.Tensor], batch: int) -> None:
    """Decode all images on the GPU."""
    for at in range(0, len(tensors), batch):
        decode_jpeg(tensors[at : at + batch], mode=ImageReadMode.RGB, device="cuda")
    torch.cuda.synchronize()


def difference(contents: list[bytes], tensors: list[torch.Tensor]) -> dict[str, float]:
    """Mean and largest difference in levels of 255, and the share of values that differ, over 64 images."""
    means, largest, shares = [], 0, []
    for content, tensor in zip(contents[:64], tensors[:64], strict=True):
        ours = decode(content).int()
        apart = (decode_jpeg(tensor, mode=ImageReadMode.RGB, device="cuda").cpu().int() - ours).abs()
        means.append(apart.float().mean().item())
        shares.append((apart > 0).float().mean().item())
        largest = max(largest, int(apart.max()))
    return {"mean": sum(means) / len(means), "largest": largest, "share": sum(shares) / len(shares)}


if __name__ == "__main__":
    main()
