"""What BatchNorm statistics tell MoCo about a query's key: whole batch, groups, and groups that differ for keys.

    python benchmarks/shuffle_bn.py [--out FILE] [--epochs 20] [--seeds 0 1]

A narrow ResNet on synthetic textures with the settings of the study `methods-textures`, trained in three ways that
differ in BatchNorm alone. After training, images are encoded in training mode, and their keys in two forms: as in
training, and with the statistics of other images (in groups of images from eight batches). Weights and images are the
same; what the second form loses, queries found by statistics that they share with their keys.

    pretext_accuracy    queries closer to their own key than to the whole queue, mean over the last epoch, in percent
    as_trained          the same after training, against 512 keys of other batches
    other_statistics    the same, the own key with the statistics of other images
    knn                 kNN accuracy (k = 20) of frozen features, in percent
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tico_ssl import evaluate, pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.methods import moco
from tico_ssl.methods._base import Batch
from tico_ssl.methods._embeddings import unit
from tico_ssl.results.run_folder import environment
from tico_ssl.training.checkpoint import restore
from tico_ssl.training.setup import prepare

SPLITS = 8
WAYS = {  # number of groups, and the digit that gives the group of a key
    "whole batch": (1, moco.KEYS),
    "groups, keys in those of their queries": (SPLITS, moco.QUERIES),
    "groups, keys in others": (SPLITS, moco.KEYS),
}
BATCHES = 8  # that negatives are from, and that are probed


def settings(splits: int, epochs: int, seed: int) -> dict[str, Any]:
    """Overrides of the demo, as in the study."""
    return {
        "data.limit": 5000,
        "backbone.name": "tico/resnet10-w8",
        "method": {
            "name": "moco",
            "head": "linear",
            "dim": 128,
            "temperature": 0.07,
            "queue": 512,
            "ema_start": 0.995,
            "ema_end": 0.999,
            "bn_splits": splits,
        },
        "optimizer.warmup_epochs": 1.0,
        "training.batch_size": 64,
        "training.epochs": epochs,
        "training.seed": seed,
        "training.precision": "fp32",
        "training.log_every_steps": 1,
        "training.knn_every_epochs": 0,
    }


@torch.no_grad()
def probed(overrides: dict[str, Any], checkpoint: Path) -> dict[str, float]:
    """Accuracy of queries, in percent, with keys as in training and with those of other statistics."""
    setup = prepare(load_recipe("demo", overrides), torch.device("cpu"))
    restore(checkpoint, setup.method, setup.optimizer, setup.device)
    method = setup.method.train()
    assert isinstance(method, moco.MoCo)
    views = [setup.loader.views.make(raw.pixels, raw.decisions) for raw in setup.loader.iterate(0, 2 * BATCHES)]
    encoded = [method.encode(Batch(pair, torch.arange(len(pair[0])))) for pair in views]
    negatives = torch.cat([unit(one.fixed[0]) for one in encoded[:BATCHES]])
    queries, keys = (torch.cat([getattr(one, kind)[0] for one in encoded[BATCHES:]]) for kind in ("trained", "fixed"))
    group = len(views[0][0]) // method.config.bn_splits
    images = torch.stack([pair[1] for pair in views[BATCHES:]], dim=1).flatten(0, 1)  # the batches in turn
    mixed = torch.cat([method.target(part) for part in images.split(group)])
    others = mixed.unflatten(0, (-1, BATCHES)).transpose(0, 1).flatten(0, 1)
    found = {"as_trained": keys, "other_statistics": others}
    return {name: 100 * moco.moco_loss(queries, key, negatives).accuracy.item() for name, key in found.items()}


def trained(way: str, epochs: int, seed: int) -> dict[str, Any]:
    """One run, and what is measured of it."""
    splits, moco.KEYS = WAYS[way]
    overrides = settings(splits, epochs, seed)
    with tempfile.TemporaryDirectory() as folder:
        run = pretrain("demo", out=Path(folder) / "run", overrides=overrides)
        lines = run.metrics()
        last = [line["pretext_accuracy"] for line in lines[-len(lines) // epochs :]]
        result = evaluate(run.folder, "knn")
        assert run.checkpoint_file is not None
        measured = probed(overrides, run.checkpoint_file)
    numbers = {
        "pretext_accuracy": 100 * sum(last) / len(last),
        **measured,
        "knn": result.numbers["trained"]["top1_k20"],
    }
    return {"way": way, "seed": seed, **{name: round(value, 2) for name, value in numbers.items()}}


def main() -> None:
    """Print one JSON line for each way and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = [{"machine": environment(), "epochs": arguments.epochs, "splits": SPLITS}]
    for seed in arguments.seeds:
        for way in WAYS:
            lines.append(trained(way, arguments.epochs, seed))
            print(json.dumps(lines[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
