"""Cost of the loss over embedding width and batch size: TiCo, an explicit memory bank, SimCLR's matrix.

    python benchmarks/loss_growth.py [--out FILE] [--plots FOLDER]

Milliseconds of forward and backward and their memory besides the embeddings, for n = 256 to 4,096 embeddings of width
d = 256, and for d = 256 to 8,192 at n = 512. TiCo keeps a covariance of d x d; the bank holds 65,536 embeddings
and its squared similarities are summed, which the covariance replaces; SimCLR compares 2n with 2n.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from plots import line_chart
from torch import Tensor

from tico_ssl import tico_loss
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device, tune_process

BANK = 65_536
SIZES = (256, 512, 1024, 2048, 4096)
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
MIDDLE, NARROW = 512, 256

Loss = Callable[[Tensor, Tensor], Tensor]


def tico(d: int, device: torch.device) -> Loss:
    """The loss with its covariance."""
    covariance = torch.eye(d, device=device) / d
    return lambda online, target: tico_loss(online, target, covariance, check_finite=False).loss


def bank(d: int, device: torch.device) -> Loss:
    """Squared contrast with an explicit memory."""
    memory = F.normalize(torch.randn(BANK, d, device=device), dim=1)

    def loss(online: Tensor, target: Tensor) -> Tensor:
        one, two = F.normalize(online, dim=1), F.normalize(target, dim=1)
        return 1 - (one * two).sum(1).mean() + 8 * (one @ memory.T).square().mean()

    return loss


def simclr(d: int, device: torch.device) -> Loss:
    """The normalised temperature-scaled cross entropy of 2n against 2n."""

    def loss(online: Tensor, target: Tensor) -> Tensor:
        z = F.normalize(torch.cat([online, target]), dim=1)
        logits = (z @ z.T / 0.2).fill_diagonal_(float("-inf"))
        return F.cross_entropy(logits, torch.arange(len(z), device=device).roll(len(online)))

    return loss


def cost(make: Callable[[int, torch.device], Loss], n: int, d: int, device: torch.device) -> dict[str, float]:
    """Cost of one forward and backward pass."""
    loss = make(d, device)
    online, target = (torch.randn(n, d, device=device, requires_grad=True) for _ in range(2))

    def work() -> None:
        torch.autograd.grad(loss(online, target), online)

    seconds = [_seconds(work, device) for _ in range(3 if device.type == "cpu" else 30)]
    line = {"milliseconds": 1000 * statistics.median(seconds)}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        line["mebibytes"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return line


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print one JSON line for each loss, n and d."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    device = choose_device()
    tune_process(device)
    lines: list[dict[str, Any]] = [{"machine": environment()}]
    for n, d in [(n, NARROW) for n in SIZES] + [(MIDDLE, d) for d in WIDTHS[1:]]:
        for name, make in (("TiCo", tico), (f"bank of {BANK:,}", bank), ("SimCLR", simclr)):
            measured = {key: round(value, 4) for key, value in cost(make, n, d, device).items()}
            lines.append({"loss": name, "n": n, "d": d, **measured})
            print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arguments.plots:
        draw(lines[1:], arguments.plots)


def draw(lines: list[dict[str, Any]], folder: Path) -> None:
    """Time and memory over batch size and width."""
    folder.mkdir(parents=True, exist_ok=True)
    for axis, fixed, value, text in (("n", "d", NARROW, "embeddings in a batch"), ("d", "n", MIDDLE, "dimensions")):
        for key in ("milliseconds", "mebibytes"):
            chosen = [line for line in lines if line[fixed] == value and line.get(key)]
            traces: dict[str, list[tuple[float, float]]] = {}
            for line in chosen:
                traces.setdefault(line["loss"], []).append((line[axis], line[key]))
            if traces:
                title = f"Cost of the loss, {fixed} = {value}"
                line_chart(folder / f"loss-{key}-over-{axis}.svg", title, text, key, traces)


if __name__ == "__main__":
    main()
