"""The figure of README: accuracy on CIFAR-10 over seconds of training on one GPU, from the stored logs.

python benchmarks/accuracy_over_time.py [--out docs/plots/accuracy-over-gpu-seconds.png]

A point is a finished run. Runs of one method are joined, though their recipes differ: at 54 s every method has its own
recipe shortened to that time, later ones repeat published settings.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tico_ssl.report.charts import PALETTE
from tico_ssl.report.static import STYLE

LOGS = Path(__file__).parent / "logs"
NAMES = {
    "barlow-twins": "Barlow Twins",
    "byol": "BYOL",
    "moco": "MoCo",
    "simclr": "SimCLR",
    "simsiam": "SimSiam",
    "swav": "SwAV",
    "tico": "TiCo",
    "vicreg": "VICReg",
}
LABEL_GAP = 1.15  # points of accuracy between two labels
Points = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "docs" / "plots" / "accuracy-over-gpu-seconds.png"
    parser.add_argument("--out", type=Path, default=default)
    draw(measured(), parser.parse_args().out)


def measured() -> Points:
    """(seconds of training, kNN accuracy with k = 200) of every method's runs, in order of time."""
    points: Points = defaultdict(list)
    study = LOGS / "studies" / "methods-cifar10"
    for row in json.loads((study / "results.json").read_text())["rows"]:
        if row["run"] in NAMES:
            points[row["run"]].append((row["seconds"], knn(study / f"{row['run']}-seed0")))
    for run in sorted((LOGS / "reproductions").iterdir()):
        method = next((name for name in NAMES if run.name.startswith(name)), None)
        if method and (run / "results.jsonl").exists():
            points[method].append((training_seconds(run), knn(run)))
    return {name: sorted(line) for name, line in points.items()}


def knn(run: Path) -> float:
    """Accuracy of the trained network in per cent."""
    results = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    return next(result["numbers"]["trained"]["top1_k200"] for result in results if result["protocol"] == "knn")


def training_seconds(run: Path) -> float:
    """As the last line of the log has it, kNN during training included."""
    found = re.findall(r"trained in ([\d,]+) s", (run / "train.log").read_text())
    return float(found[-1].replace(",", ""))


def draw(points: Points, path: Path) -> None:
    """One line per method, named at its first point."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot(
            xlabel="seconds of training, one H200", ylabel="kNN accuracy, k = 200 (%)", xscale="log"
        )
        axes.set_title("CIFAR-10, ResNet-18", loc="left")
        label_at = float("inf")
        by_first = sorted(points.items(), key=lambda item: -item[1][0][1])
        for (name, line), colour in zip(by_first, PALETTE):
            axes.plot(*zip(*line), "o-", color=colour, markersize=5 if name != "tico" else 8, linewidth=1.2)
            label_at = min(line[0][1], label_at - LABEL_GAP)
            axes.text(line[0][0] / 1.08, label_at, NAMES[name], color=colour, ha="right", va="center")
        marks = [54, 120, 240, 480, 1500]
        axes.set_xticks(marks, [str(mark) for mark in marks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(27, 2000)
        figure.savefig(path, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
