"""The nearest of a million images: seconds and memory of the search, and whether it finds what was planted.

    python benchmarks/search.py [--images 1000000] [--width 512] [--queries 1 16 256] [--out FILE]

Features are random directions in a file that is mapped into memory, as an index is. Each query is a row of it with
noise, so its nearest image is known; the cosines found are compared with float64.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tico_ssl.features.neighbours import nearest
from tico_ssl.results.run_folder import environment

TOP, ROWS = 12, 50_000


def main() -> None:
    """Print, and write, JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [json.dumps({"machine": environment()})]
    with tempfile.TemporaryDirectory() as place:
        bank = planted(Path(place) / "rows", arguments.images, arguments.width)
        for count in arguments.queries:
            lines.append(json.dumps({"images": len(bank), "width": bank.shape[1]} | searched(bank, count)))
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def planted(file: Path, images: int, width: int) -> torch.Tensor:
    """Unit rows, mapped from the disk."""
    generator = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(file, "w+", np.float32, (images, width))
    for start in range(0, images, ROWS):
        part = generator.standard_normal((min(ROWS, images - start), width), np.float32)
        rows[start : start + ROWS] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return torch.from_numpy(rows)


def searched(bank: torch.Tensor, count: int) -> dict[str, float]:
    """One search, after one that is not counted and reads the file."""
    generator = torch.Generator().manual_seed(count)
    chosen = torch.randperm(len(bank), generator=generator)[:count]
    queries = bank[chosen] + 0.02 * torch.randn(count, bank.shape[1], generator=generator)
    nearest(bank, queries[:1], TOP)
    begin = time.perf_counter()
    found = nearest(bank, queries, TOP)
    seconds = time.perf_counter() - begin
    exact = F.cosine_similarity(bank[found.places].double(), queries[:, None].double(), dim=2)
    return {
        "queries": count,
        "seconds": round(seconds, 2),
        "planted_found_first": int((found.places[:, 0] == chosen).sum()),
        "largest_error_of_a_cosine": float((found.cosines - exact).abs().max()),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,  # pages of the file included
    }


if __name__ == "__main__":
    main()
