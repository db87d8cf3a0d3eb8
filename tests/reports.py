"""Run folders and pictures for tests of the report, made without any training."""

import json

import numpy as np

from tico_ssl.config.recipe import dump_recipe, load_recipe
from tico_ssl.features.picture import Images, Picture
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.files import digest

EVIL = "<script>alert(1)</script>"


def write_lines(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def log_line(step, epoch, **values) -> dict:
    usual = {"loss": 1.0, "mean_cosine": 0.1, "largest_eigenvalue": 0.1, "participation_ratio": 50.0, "lr": 0.1}
    clock = {"images_per_second": 100.0, "data_wait": 0.0, "seconds": float(step)}
    return {"step": step, "epoch": epoch, **usual, **clock, **values}


def made_run(folder, *, metrics=None, results=(), backbone=True, overrides=None, spectrum=()) -> Run:
    """A run folder as training leaves it, without any training."""
    recipe = load_recipe("demo", {"training.epochs": 2, "training.batch_size": 100, **(overrides or {})})
    (folder / "checkpoints").mkdir(parents=True)
    run = Run(folder)
    run.recipe_file.write_text(dump_recipe(recipe))
    (folder / "environment.json").write_text(
        json.dumps({"gpu": None, "processor": "a CPU", "packages": {"torch": "2"}})
    )
    write_lines(run.metrics_file, [log_line(10, 1.0), log_line(20, 2.0)] if metrics is None else metrics)
    write_lines(run.spectrum_file, spectrum)
    if backbone:
        run.backbone_file.write_bytes(b"weights")
        made = {"checkpoint": digest(run.backbone_file), "data": {}, "settings": {}, "seconds": 1.0, "seed": 0}
        write_lines(run.results_file, [made | result for result in results])
    return run


def knn(trained, untrained, **more) -> dict:
    return {
        "protocol": "knn",
        "numbers": {"trained": {"top1_k20": trained}, "untrained": {"top1_k20": untrained}},
        "data": {"test": 1_000},
        **more,
    }


def small_picture(names, labelled=True) -> Picture:
    """Eight points of two classes, one query with two neighbours, one of them of the other class."""
    pixels = np.zeros((8, 8, 8, 3), dtype=np.uint8)
    labels = np.array([0, 1] * 4) if labelled else None
    two = np.array([0, 1]) if labelled else None
    return Picture(
        data="d",
        classes=list(names) if labelled else [],
        points=Images([EVIL] * 8, labels, pixels),
        positions=np.arange(16.0).reshape(8, 2),
        clusters=None if labelled else np.array([0, 1] * 4),
        how="by hand",
        queries=Images([EVIL], None if two is None else two[:1], pixels[:1]),
        neighbours=Images([EVIL, "b"], two, pixels[:2]),
        similarity=np.array([[0.9, 0.8]]),
        confusion=np.array([[3, 1], [0, 4]]) if labelled else None,
    )
