"""All runs of a study for the same seconds, one after the other in one process: for many short runs on a GPU, of which
`tico study` would spend half of the time on starting processes.

    python -m benchmarks.in_turn STUDY.yaml --data cifar10.npz --seconds 27 [--only NAME ...] [--out ledger.jsonl]

Each run ends with its schedule; how many epochs the seconds buy follows from its steps, timed before (once for all
variants that cost the same). A tenth of the training images is held out (`data.held_out`), and everything is measured
on these; the test images are not looked at. Frozen features of unaugmented images: kNN, a linear probe of weight decay
1e-3, RankMe, eigenvalues of their covariance, and the squared distance of two views at unit length. Prints and appends
a JSON line per run, after one about the machine; runs that are in the file already are left out.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tico_ssl import load_backbone, pretrain
from tico_ssl.bench.stages import LR, PROGRESS, Subject
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.recipe import Recipe
from tico_ssl.config.study import expand, load_study
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_source, open_training
from tico_ssl.evaluations._representation.spectra import eigenvalues, entropy_rank, rankme, thinned
from tico_ssl.evaluations._representation.sphere import alignment
from tico_ssl.features.extraction import extract
from tico_ssl.features.frozen import Features
from tico_ssl.features.knn import knn_accuracy
from tico_ssl.features.linear import probe
from tico_ssl.features.settings import KnnConfig, LinearConfig
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.run_folder import Run, environment
from tico_ssl.runtime.device import autocast, choose_device, resolve_precision, tune_process
from tico_ssl.studies.cost import work_of
from tico_ssl.training.setup import build_learner, build_step, build_views

HELD_OUT = 0.1
TIMED_SECONDS = 1.0
POINTS = 24  # eigenvalues in a line
VIEWED = 8  # batches of two views


def main() -> None:
    """Carry out what is not in the ledger yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--limit", type=int, help="images, for a trial")
    parser.add_argument("--scratch", type=Path, help="folder for runs, which are removed")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.scratch is not None:
        given.scratch.mkdir(parents=True, exist_ok=True)
    device = choose_device()
    tune_process(device)
    always = {"data.source": given.data, "data.held_out": HELD_OUT} | (
        {"data.limit": given.limit} if given.limit else {}
    )
    study, done = load_study(given.study, always), known(given.out)
    if not done:
        tell({"machine": environment(), "study": given.study, "seconds": given.seconds}, given.out)
    costs: dict[str, float] = {}
    for variant in expand(study):
        if variant.name in done or (given.only and variant.name not in given.only):
            continue
        recipe = variant.load()
        source = open_training(recipe.data)
        if (work := work_of(variant)) not in costs:
            costs[work] = epoch_seconds(recipe, source, device)
        epochs = max(1, round(given.seconds / costs[work]))
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=given.scratch) as place:
            changes = variant.with_seed(study.seeds[0], epochs) | {"training.knn_every_epochs": 0}
            run = pretrain(variant.recipe, out=Path(place) / "run", overrides=changes)
            found = last_values(run) | measured(recipe, run, source, device)
        line = {"name": variant.name, "epochs": epochs, "epoch_seconds": round(costs[work], 3)}
        tell(line | found | {"wall": round(time.perf_counter() - begun, 1), "changes": variant.changes}, given.out)


def known(out: Path | None) -> set[str]:
    """The runs of a ledger, and "" for the line about its machine."""
    if out is None or not out.is_file():
        return set()
    return {json.loads(line).get("name", "") for line in out.read_text(encoding="utf-8").splitlines()}


def tell(line: dict[str, Any], out: Path | None) -> None:
    """Print a line, without what is long, and append it to the ledger."""
    long = ("changes", "spectrum", "machine")
    print(json.dumps({key: value for key, value in line.items() if key not in long}), file=sys.stderr, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def epoch_seconds(recipe: Recipe, source: Source, device: torch.device) -> float:
    """Seconds of an epoch's steps, from the loader to the target update."""
    precision = resolve_precision(recipe.training.precision, device)
    subject = Subject.of(recipe, device, precision, source)
    step = build_step(build_learner(recipe, device, subject.views, subject.loader.steps_per_epoch))
    batches = subject.raw_batches()
    times = time_calls(lambda: step(next(batches), LR, PROGRESS), TIMED_SECONDS, device)
    step.close()
    return statistics.fmean(times) * subject.loader.steps_per_epoch


def last_values(run: Run) -> dict[str, Any]:
    """Of the last log step of training: the terms of the loss, ranks, seconds."""
    last = [line for line in run.metrics() if "loss" in line][-1]
    names = [name for name, value in last.items() if isinstance(value, float) and name not in ("epoch", "data_wait")]
    return {name: float(f"{last[name]:.4g}") for name in names}


def measured(recipe: Recipe, run: Run, source: Source, device: torch.device) -> dict[str, Any]:
    """Everything about the backbone's features of held-out images."""
    backbone = load_backbone(run.folder).to(device)
    assert isinstance(backbone, Backbone)
    held_out = open_source(recipe.data, "test")
    assert held_out is not None
    of_train, of_held_out = (extract(backbone, images, device, dtype=torch.bfloat16) for images in (source, held_out))
    features = Features.of(source, of_train, held_out, of_held_out)
    numbers = dict(knn_accuracy(features, KnnConfig(), device))
    numbers |= {"linear": probe(features, LinearConfig(weight_decays=(1e-3,)), device)["top1"]}
    spectrum = eigenvalues(features.test.to(device))
    numbers |= {"rankme": rankme(features.test.to(device)), "rank_by_variance": entropy_rank(spectrum)}
    numbers |= {"alignment": distance_of_views(recipe, backbone, held_out, device)}
    shares = thinned(spectrum / spectrum.sum(), POINTS)
    return {name: round(value, 4) for name, value in numbers.items()} | {"spectrum": shares}


@torch.no_grad()
def distance_of_views(recipe: Recipe, backbone: Backbone, source: Source, device: torch.device) -> float:
    """Mean squared distance of the features of two views of an image."""
    subject = Subject.of(recipe, device, torch.float32, source)
    batches, apart = subject.loader.iterate(0, VIEWED), []
    views = build_views(recipe, device)
    for raw in batches:
        with autocast(device, torch.bfloat16):
            made = views.make(raw.pixels, raw.decisions)[:2]
            one, other = (backbone(view.to(torch.float32)).float() for view in made)
        apart.append(alignment(one, other))
    return statistics.fmean(apart)


if __name__ == "__main__":
    main()
