"""Time of evaluations on extracted features: kNN and the linear probe at the size of CIFAR-10.

    python benchmarks/probes.py [--out FILE]

50,000 training and 10,000 test features of width 512, drawn around one centre per class (10 or 100); protocols have
their default settings.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from tico_ssl.features.frozen import Features
from tico_ssl.features.knn import knn_accuracy
from tico_ssl.features.linear import probe
from tico_ssl.features.settings import KnnConfig, LinearConfig
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import choose_device, tune_process

TRAIN, TEST, WIDTH = 50_000, 10_000, 512
SPREAD = 6.0  # standard deviation around the centres, so that classes overlap


def drawn(classes: int) -> Features:
    """Features with labels."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, WIDTH, generator=generator)
    labels = torch.randint(0, classes, (TRAIN + TEST,), generator=generator)
    features = centres[labels] + SPREAD * torch.randn(TRAIN + TEST, WIDTH, generator=generator)
    return Features(features[:TRAIN], features[TRAIN:], labels[:TRAIN], labels[TRAIN:])


def main() -> None:
    """Print one JSON line for each protocol and number of classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device()
    tune_process(device)
    lines: list[dict[str, Any]] = [{"machine": environment(), "threads": torch.get_num_threads()}]
    for classes in (10, 100):
        features = drawn(classes)
        for name, measure in (
            ("knn", lambda f: knn_accuracy(f, KnnConfig(), device)),
            ("linear", lambda f: probe(f, LinearConfig(), device)),
        ):
            begin = time.perf_counter()
            numbers = measure(features)
            seconds = round(time.perf_counter() - begin, 2)
            lines.append({"protocol": name, "classes": classes, "seconds": seconds, **numbers})
            print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
