"""What BatchNorm statistics tell MoCo about a query's key: whole batch, groups, and groups that differ for keys.

    python benchmarks/shuffle_bn.py [--out FILE] [--epochs 25] [--seeds 0 1]

A narrow ResNet on synthetic textures with the settings of the study `methods-textures`, trained in three ways that
differ in BatchNorm alone. After training, new batches are encoded in training mode. A query's mates are the keys of
*other* images whose BatchNorm statistics are those of its own key, strangers the keys of 512 images of other batches.

    pretext_accuracy    queries closer to their own key than to the whole queue, mean over the last epoch, in percent
    mate, stranger      mean cosine of queries with mates and with strangers: equal if statistics tell nothing
    wrong_key_found     a mate closer than all strangers, in percent: found by statistics, since the image is another
    knn                 kNN accuracy (k = 20) of frozen features, in percent
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl import evaluate, pretrain
from tico_ssl.config.recipe import load_recipe
from tico_ssl.methods import moco
from tico_ssl.methods._base import Batch
from tico_ssl.results.run_folder import environment
from tico_ssl.training.checkpoint import restore
from tico_ssl.training.pretrain import prepare

SPLITS = 8
WAYS = {  # number of groups, and the digit that gives the group of a key
    "whole batch": (1, moco.KEYS),
    "groups, keys in those of their queries": (SPLITS, moco.QUERIES),
    "groups, keys in others": (SPLITS, moco.KEYS),
}
STRANGERS, PROBED = 8, 8  # batches


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


def group_of_key(images: int, splits: int) -> Tensor:
    """The number of the group that every image's key is computed in."""
    if splits == 1:
        return torch.zeros(images, dtype=torch.int64)
    groups = [torch.full((images // splits, 1), number) for number in range(splits)]
    return moco.joined(groups, moco.KEYS).flatten()


@torch.no_grad()
def probed(overrides: dict[str, Any], checkpoint: Path) -> dict[str, float]:
    """Cosines of queries with mates and strangers, in training mode."""
    setup = prepare(load_recipe("demo", overrides), torch.device("cpu"))
    restore(checkpoint, setup.method, setup.optimizer, setup.device)
    setup.method.train()
    pairs = []
    for raw in setup.loader.iterate(0, STRANGERS + PROBED):
        encoded = setup.method.encode(Batch(setup.loader.views.make(raw.pixels, raw.decisions), raw.index))
        pairs.append((F.normalize(encoded.trained[0], dim=1), F.normalize(encoded.fixed[0], dim=1)))
    strangers = torch.cat([keys for _, keys in pairs[:STRANGERS]])
    images = len(pairs[0][0])
    group = group_of_key(images, overrides["method"]["bn_splits"])
    mates = (group[:, None] == group) & ~torch.eye(images, dtype=torch.bool)
    with_mates = torch.cat([(queries @ keys.T)[mates] for queries, keys in pairs[STRANGERS:]])
    with_strangers = torch.cat([queries @ strangers.T for queries, _ in pairs[STRANGERS:]])
    nearest = with_strangers.amax(dim=1).repeat_interleave(int(mates[0].sum()))
    return {
        "mate": with_mates.mean().item(),
        "stranger": with_strangers.mean().item(),
        "wrong_key_found": 100 * (with_mates > nearest).double().mean().item(),
    }


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
    return {"way": way, "seed": seed, **{name: round(value, 4) for name, value in numbers.items()}}


def main() -> None:
    """Print one JSON line for each way and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=25)
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
