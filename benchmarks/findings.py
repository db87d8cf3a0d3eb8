"""The figures of docs/findings.md, from the stored logs.

python benchmarks/findings.py [--out docs/plots]
"""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tico_ssl.report.charts import PALETTE
from tico_ssl.report.static import STYLE

LOGS = Path(__file__).parent / "logs"
SEARCH = LOGS / "development" / "cifar10-tico-search" / "ledger.jsonl"
RATES = {  # learning rate and weight decay of the runs that differ in nothing else; 30 epochs of 175 steps
    "S": (0.12, 5e-4),
    "S-lr.06": (0.06, 5e-4),
    "S-lr.2": (0.2, 5e-4),
    "S-wd2e-4": (0.12, 2e-4),
    "S-wd1e-3": (0.12, 1e-3),
    "LW": (0.2, 1e-3),
    "L3W": (0.3, 1e-3),
    "W2": (0.12, 2e-3),
}


def main() -> None:
    """Draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "plots")
    out = parser.parse_args().out
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):  # text as text, not as paths
        for name, draw in {"rate-times-decay": rate_times_decay, "simsiam-networks": simsiam_networks}.items():
            figure = Figure(figsize=(6.4, 3.8), layout="constrained")
            draw(figure.add_subplot())
            figure.savefig(out / f"finding-{name}.svg", metadata={"Date": None})


def rate_times_decay(axes: Axes) -> None:
    """Accuracy of short runs over the product of learning rate and weight decay, which is all that they differ in."""
    ledger = {row["name"]: row for row in map(json.loads, SEARCH.read_text().splitlines())}
    points = sorted((lr * decay, lr, decay, ledger[name]) for name, (lr, decay) in RATES.items())
    for key, label, colour in (("linear", "linear", PALETTE[1]), ("top1_k20", "kNN, k = 20", PALETTE[0])):
        axes.plot([p[0] for p in points], [p[3][key] for p in points], "o", color=colour, label=label)
    for product, lr, decay, row in points:
        place = {"xytext": (0, -6), "textcoords": "offset points", "rotation": 90, "ha": "center", "va": "top"}
        axes.annotate(f"{lr:g} × {decay:g}", (product, row["top1_k20"]), size=7, **place)
    axes.set(xscale="log", xlabel="learning rate × weight decay", ylabel="accuracy, held-out images (%)", ylim=(58, 80))
    axes.set_title("TiCo, CIFAR-10, 30 epochs", loc="left")
    axes.legend(loc="upper left", labelcolor="linecolor")


def simsiam_networks(axes: Axes) -> None:
    """kNN during training of the same recipe with two projectors."""
    runs = {
        "last BatchNorm without weights and biases": "init",
        "with them": "all",
    }
    for (label, run), colour in zip(runs.items(), PALETTE):
        text = (LOGS / "reproductions" / f"simsiam-lightly-{run}" / "metrics.jsonl").read_text()
        rows = [row for row in map(json.loads, text.splitlines()) if "knn_top1_k200" in row]
        axes.plot([r["epoch"] for r in rows], [r["knn_top1_k200"] for r in rows], "o-", color=colour, label=label)
    axes.set(xlabel="epochs", ylabel="kNN accuracy, k = 200 (%)")
    axes.set_title("SimSiam, CIFAR-10, projector of three layers", loc="left")
    axes.legend(loc="lower right", labelcolor="linecolor")


if __name__ == "__main__":
    main()
