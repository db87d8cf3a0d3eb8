"""JPEGs decoded by the GPU (nvJPEG, by torchvision) against as many processes as there are CPU cores.

    python benchmarks/nvjpeg.py FOLDER [--rounds 5] [--out FILE]

Both decode whole images; the processes drop them, as they would write them into a store. How far the pixels of the two
decoders differ is measured as well: a run that changes its decoder on resume would not be the same run.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from tico_ssl.data.decoding import decode
from tico_ssl.pipeline.workers import ahead, default_workers
from tico_ssl.results.run_folder import environment

BATCHES = (1, 16, 64, 256)


def main() -> None:
    """Print, and write, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    contents = [path.read_bytes() for path in sorted(arguments.folder.rglob("*.jpg"))]
    lines = [{"machine": environment(), "images": len(contents), "bytes": sum(map(len, contents))}]
    processes = default_workers()
    lines.append(
        {
            "what": f"{processes} processes",
            "images_per_second": best(lambda: by_cpu(contents, processes), arguments.rounds, len(contents)),
        }
    )
    if torch.cuda.is_available():
        tensors = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        for batch in BATCHES:
            rate = best(lambda batch=batch: by_gpu(tensors, batch), arguments.rounds, len(contents))
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


def by_cpu(contents: list[bytes], processes: int) -> None:
    """Decode all images by processes, which start anew in every round."""

    def several(places: range) -> int:
        for place in places:
            decode(contents[place])
        return len(places)

    pieces = [range(at, min(at + 16, len(contents))) for at in range(0, len(contents), 16)]
    for _ in ahead(several, pieces, processes):
        pass


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
