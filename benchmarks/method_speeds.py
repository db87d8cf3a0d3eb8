"""Training throughput of every run of a study, one after the other on an otherwise idle machine; nothing is trained.

python benchmarks/method_speeds.py [STUDY] [--data textures] [--limit 50000] [--out FILE]
"""

import argparse
import gc
import json
from pathlib import Path

import torch

from tico_ssl.config.study import expand, load_study
from tico_ssl.results.run_folder import environment
from tico_ssl.studies.timing import measure


def main() -> None:
    """Print, and write, one JSON line for the machine and one for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="methods-cifar10")
    parser.add_argument("--data", default="textures", help="images to time the steps with")
    parser.add_argument("--limit", type=int, default=50_000, help="how many of them")
    parser.add_argument("--out", type=Path, help="file for the lines")
    arguments = parser.parse_args()
    study = load_study(arguments.study, {"data.source": arguments.data, "data.limit": arguments.limit})
    lines = [{"machine": environment(), "study": arguments.study, "data": arguments.data, "images": arguments.limit}]
    for variant in expand(study):
        cost = measure(variant.load())
        speed = round(cost.images_per_second)
        lines.append({"run": variant.name, "batch": cost.batch_size, "images_per_second": speed})
        print(json.dumps(lines[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
