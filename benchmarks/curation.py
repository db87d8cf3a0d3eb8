"""How well `tico curate` finds planted near-duplicates and outliers among photos.

    python benchmarks/curation.py PHOTOS [--limit N] [--epochs N] [--model MODEL] [--out FILE] [--page FOLDER]

Beside the photos (any folder of image files) are planted: photos encoded again as JPEG of quality 70; photos cropped by
2 to 5 % on each side; outliers that are no photos (noise, stripes, checks, rings, pages of text). Two networks: one
with random weights, and the same after a short TiCo pretraining on these very images; or --model alone. Recall is exact.
Photos may be near-duplicates of each other already, so precision is a lower bound: of the images in groups, those in a
group with a planted pair. What is found among the photos without anything planted is counted too.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from tico_ssl import pretrain
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.names import SUFFIXES
from tico_ssl.looking_up.curating import curate
from tico_ssl.looking_up.findings import Curation
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.run_folder import environment

ENCODED, CROPPED, ODD = 100, 50, 20
SIDE = 112  # pixels of what is drawn
BACKBONE = "tico/resnet18-w16"
PIXELS = 32  # that a network sees
SETTINGS = {
    "backbone.name": BACKBONE,
    "data.image_size": PIXELS,
    "views": "symmetric-small",
    "training.precision": "fp32",
    "training.knn_every_epochs": 0,
}


def planted(photos: Path, folder: Path, limit: int) -> dict[str, list[str]]:
    """Copy photos into a folder and plant into it; for each kind the planted files, numbered as their originals."""
    files = sorted(file for file in photos.rglob("*") if file.suffix.lower() in SUFFIXES)
    count = min(limit, len(files))
    files = [files[place * len(files) // count] for place in range(count)]
    folder.mkdir(parents=True)
    for number, file in enumerate(files):
        shutil.copy(file, folder / f"photo-{number:05}{file.suffix}")
    draw = np.random.default_rng(0)
    chosen = draw.choice(len(files), ENCODED + CROPPED, replace=False).tolist()
    names: dict[str, list[str]] = {"encoded": [], "cropped": [], "odd": []}
    for place in chosen[:ENCODED]:
        names["encoded"].append(f"encoded-{place:05}.jpg")
        Image.open(files[place]).convert("RGB").save(folder / names["encoded"][-1], quality=70)
    for place in chosen[ENCODED:]:
        image = Image.open(files[place]).convert("RGB")
        left, top, right, bottom = draw.uniform(0.02, 0.05, 4)
        width, height = image.size
        box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
        names["cropped"].append(f"cropped-{place:05}.png")
        image.crop(tuple(round(value) for value in box)).save(folder / names["cropped"][-1])
    for number, image in enumerate(odd_images(draw)):
        names["odd"].append(f"odd-{number:02}.png")
        image.save(folder / names["odd"][-1])
    return names


def odd_images(draw: np.random.Generator) -> Iterator[Image.Image]:
    """Noise, stripes, checks, rings and pages of text, four of each."""
    y, x = np.mgrid[:SIDE, :SIDE]
    for number in range(ODD):
        period, colours = draw.integers(4, 16), draw.integers(0, 256, (2, 3))
        kind = number % 5
        if kind == 4:
            yield page_of_text(draw)
            continue
        centre = draw.integers(0, SIDE, 2)
        patterns = {
            0: draw.integers(0, 2, (SIDE, SIDE)),
            1: (x + number * y) // period % 2,
            2: (x // period + y // period) % 2,
            3: np.hypot(x - centre[0], y - centre[1]).astype(int) // period % 2,
        }
        yield Image.fromarray(colours[patterns[kind]].astype(np.uint8))


def page_of_text(draw: np.random.Generator) -> Image.Image:
    """Black lines of characters on white."""
    page = Image.new("RGB", (SIDE, SIDE), "white")
    for line in range(4, SIDE - 8, 10):
        text = "".join(map(chr, draw.integers(97, 123, int(draw.integers(8, 17)))))
        ImageDraw.Draw(page).text((4, line), text, fill="black")
    return page


def network(here: Path, epochs: int) -> Path:
    """With random weights, or pretrained on the photos."""
    if epochs:
        settings = SETTINGS | {"training.epochs": epochs}
        return pretrain("demo", str(here / "photos"), here / "run", settings).folder
    torch.manual_seed(0)
    save_backbone(build_backbone(BackboneConfig(name=BACKBONE, zero_gamma=False), PIXELS), here / "random.safetensors")
    return here / "random.safetensors"


def number_of(path: str) -> str:
    """The number of a photo, also in the name of its copy."""
    return path.partition("-")[2].partition(".")[0]


def measured(found: Curation, names: dict[str, list[str]]) -> dict[str, Any]:
    """Recall of each kind, precision of groups, and where the planted outliers are."""
    group_of = {member.path: number for number, group in enumerate(found.groups) for member in group}
    photo_of = {number_of(m.path): m.path for m in found.outliers if m.path.startswith("photo-")}
    hits = {
        kind: [
            name
            for name in names[kind]
            if name in group_of and group_of[name] == group_of.get(photo_of[number_of(name)])
        ]
        for kind in ("encoded", "cropped")
    }
    right = {group_of[name] for kind in hits.values() for name in kind}
    grouped = sum(len(found.groups[number]) for number in right)
    ranks = [rank for rank, member in enumerate(found.outliers, 1) if member.path in set(names["odd"])]
    return {
        "images": found.images,
        "threshold": round(found.threshold.cosine, 7),
        "recall_encoded": len(hits["encoded"]) / ENCODED,
        "recall_cropped": len(hits["cropped"]) / CROPPED,
        "groups": len(found.groups),
        "images_in_groups": found.copies,
        "precision_at_least": round(grouped / max(1, found.copies), 4),
        "largest_group": max(map(len, found.groups), default=0),
        "outliers_among_first_20": sum(rank <= ODD for rank in ranks),
        "rank_of_last_outlier": ranks[-1],
        "outliers_by_rule": found.unusual,
        "of_them_planted": sum(rank <= found.unusual for rank in ranks),
    }


def main() -> None:
    """Print one JSON line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--limit", type=int, default=10**9, help="so many of the photos, evenly spaced")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="keep the tables and pages in this folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--model", help="a run or a backbone's file instead of the two networks")
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = [{"machine": environment(), "threads": torch.get_num_threads()}]
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        names = planted(arguments.photos, here / "photos", arguments.limit)
        plain = here / "plain"
        plain.mkdir()
        for file in (here / "photos").glob("photo-*"):
            shutil.copy(file, plain)
        for epochs in (None,) if arguments.model else (0, arguments.epochs):
            begin = time.perf_counter()
            model = arguments.model if epochs is None else network(here, epochs)
            trained = time.perf_counter()
            found = curate(model, str(here / "photos"), (arguments.page or here) / f"curated-{epochs}", subset=100)
            seconds = time.perf_counter() - trained
            without = curate(model, str(plain), here / f"plain-{epochs}")
            network_used = {"model": arguments.model} if epochs is None else {"backbone": BACKBONE, "epochs": epochs}
            line = network_used | measured(found, names)
            line |= {"groups_without_planted": len(without.groups), "outliers_without_planted": without.unusual}
            line |= {"seconds_of_training": round(trained - begin), "seconds_of_curating": round(seconds, 1)}
            lines.append(line)
            print(json.dumps(line), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
