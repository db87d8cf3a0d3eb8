"""Plain images: decoded as the package does, and by Pillow alone, on one core.

    python benchmarks/decoding.py PHOTOS [--images 64] [--out FILE]

Photos of a folder are resized and encoded as JPEG (quality 92), WebP (quality 80) and PNG, which Pillow decodes anyway.
The two decode all of them in turn, as often as takes about a second; medians of seven rounds, in processor time. Pixels
are compared to the bit.
"""

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tico_ssl.data.decoding import decode
from tico_ssl.results.run_folder import environment

ROUNDS, SECONDS = 7, 1.0
SIZES = ((112, 112), (500, 375))
OPTIONS = {"JPEG": {"quality": 92}, "WEBP": {"quality": 80}, "PNG": {}}


def by_pillow(data: bytes) -> Tensor:
    """RGB (3, height, width)."""
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def milliseconds(decoders: dict[str, Callable[[bytes], Tensor]], files: list[bytes]) -> dict[str, float]:
    """Of an image, by each; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in decoders}
    begin = time.process_time()
    for data in files:
        by_pillow(data)
    times = max(1, round(SECONDS / (time.process_time() - begin)))
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            begin = time.process_time()
            for data in files * times:
                decoder(data)
            found[name].append((time.process_time() - begin) / times / len(files))
    return {name: round(1000 * statistics.median(values), 4) for name, values in found.items()}


def main() -> None:
    """Print one JSON line for each format and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, object]] = [{"machine": environment(), "images": arguments.images}]
    pictures = [Image.open(path).convert("RGB") for path in sorted(arguments.photos.rglob("*.jpg"))[: arguments.images]]
    for kind in OPTIONS:
        for size in SIZES:
            files = list[bytes]()
            for picture in pictures:
                stream = io.BytesIO()
                picture.resize(size).save(stream, kind, **OPTIONS[kind])
                files.append(stream.getvalue())
            assert all(torch.equal(decode(data), by_pillow(data)) for data in files)
            spent = milliseconds({"ours": decode, "pillow": by_pillow}, files)
            share = round(spent["ours"] / spent["pillow"], 3)
            lines.append({"kind": kind, "size": f"{size[0]} x {size[1]}"} | spent | {"share": share})
            print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
