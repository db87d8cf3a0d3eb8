"""The figures of docs/theory.md, from the package's own losses and the formulas of tico_ssl.theory.

python benchmarks/theory_plots.py [--out docs/plots]

Nothing is timed and no data are read: the same figures on every machine, in about ten seconds.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from plots import line_chart
from torch import Tensor

from tico_ssl import theory, tico_loss

Line = list[tuple[float, float]]
DIMENSIONS = 32
LEARNING_RATE = 0.01  # times n, since the loss is a mean
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "plots")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    draw_bound(folder / "theory-bound.svg")
    draw_memory(folder / "theory-memory.svg")
    draw_collapse(folder / "theory-collapse.svg")
    draw_push(folder / "theory-push.svg")


def unit_rows(n: int, d: int) -> Tensor:
    """Random unit vectors with a fixed seed."""
    return F.normalize(torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=1)


def draw_bound(path: Path) -> None:
    """The norm of the covariance over the size of the batch: random, the paper's bound, and what descent finds."""
    d, sizes = DIMENSIONS, (2, 4, 8, 16, 32, 64, 128, 256, 512)
    lines: dict[str, Line] = {
        "random vectors": [(n, theory.expected_contrast(1 / d, n, rho=1, beta=0)) for n in sizes],
        "the paper's bound": [(n, 1 / d) for n in sizes],
        "least, by descent": [(n, least_norm(n, d)) for n in sizes],
    }
    line_chart(path, f"Norm of the covariance, d = {d}", "unit vectors in the batch, n", "|C|²", lines)


def least_norm(n: int, d: int) -> float:
    """Where gradient descent on TiCo's contrast ends, without memory and with embeddings free to move."""
    z, nothing = unit_rows(n, d), torch.zeros(d, d, dtype=torch.float64)
    for _ in range(1000):
        z.requires_grad_()
        (slope,) = torch.autograd.grad(tico_loss(z, z, nothing, rho=1.0, beta=0.0).contrast, z)
        z = F.normalize(z.detach() - n * min(n, d) / 8 * slope, dim=1)
    return float(theory.second_moment(z).square().sum())


def draw_memory(path: Path) -> None:
    """Length of the memory over steps: without forgetting, and for several values of beta."""
    lines: dict[str, Line] = {"all batches": [(step, step) for step in STEPS]}
    for beta in (0.99, 0.9, 0.5):
        lines[f"beta = {beta}"] = [(step, theory.memory_length(beta, step)) for step in STEPS]
    line_chart(path, "Length of the memory", "steps", "batches of equal weight", lines)


def draw_collapse(path: Path) -> None:
    """Distance from collapse over gradient descent from near one point: measured, and predicted by the growth rate."""
    measured = {f"rho = {rho:g}": distances_from_collapse(rho) for rho in (8.0, 1.0, 0.2)}
    start = measured["rho = 8"][0][1]
    lines: dict[str, Line] = {}
    for rho in (8.0, 1.0):  # drawn below the measured lines, so visible where they differ; at 0.2 they never do
        factor = 1 + LEARNING_RATE * theory.collapse_growth(rho, beta=0.9)
        predicted = [(step, start * factor ** (step - 1)) for step in STEPS]
        lines[f"predicted, rho = {rho:g}"] = [point for point in predicted if point[1] < 50]
    lines |= measured
    line_chart(path, "Leaving collapse", "steps of descent", "deviation from the mean embedding", lines)


def distances_from_collapse(rho: float, n: int = 64, d: int = DIMENSIONS) -> Line:
    """Gradient descent on free embeddings; the target stays collapsed, the memory follows as in training."""
    deviation = 1e-5 * unit_rows(n, d)
    collapsed = unit_rows(1, d).expand(n, d)
    z, covariance = F.normalize(collapsed + deviation - deviation.mean(dim=0), dim=1), theory.second_moment(collapsed)
    line: Line = []
    for step in range(1, STEPS[-1] + 1):
        if step in STEPS:
            line.append((step, float((z - z.mean(dim=0)).norm(dim=1).mean())))
        z.requires_grad_()
        terms = tico_loss(z, collapsed, covariance, rho=rho)
        (slope,) = torch.autograd.grad(terms.loss, z)
        z, covariance = F.normalize(z.detach() - LEARNING_RATE * n * slope, dim=1), terms.covariance
    return line


def draw_push(path: Path) -> None:
    """Repulsion by one key of a thousand over its cosine, the others being orthogonal."""
    cosines, keys = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), 1000
    lines: dict[str, Line] = {"squared, rho = 8": [], "InfoNCE, tau = 0.2": [], "InfoNCE, tau = 0.07": []}
    for cosine in cosines:
        similarities = torch.zeros(keys, dtype=torch.float64)
        similarities[0] = cosine
        pushes = (
            theory.squared_push(similarities),
            theory.info_nce_push(similarities, 0.2),
            theory.info_nce_push(similarities, 0.07),
        )
        for line, push in zip(lines.values(), pushes):
            line.append((cosine, float(push[0])))
    line_chart(path, "The push of one negative among 1,000", "its cosine", "slope of the loss", lines)


if __name__ == "__main__":
    main()
