"""Published results in the report: each run beside the row of its settings, and never beside another."""

import json

import pytest

from tico_ssl.config.recipe import dump_recipe, load_recipe
from tico_ssl.report import report, static
from tico_ssl.report.published import beside_published, published
from tico_ssl.results.comparison import grouped
from tico_ssl.results.reading import read_records
from tico_ssl.results.run_folder import Run
from tico_ssl.runtime.files import digest

SETTINGS = {
    "knn": {"voters": [{"k": 20, "temperature": 0.07}, {"k": 200, "temperature": 0.1}]},
    "detection": {"neck": "fpn", "iterations": 24_000},
    "segmentation": {"neck": "fpn", "iterations": 90_000},
}
DATA = {
    "ImageNet": {"source": "imagenet", "train": 1_281_167, "test": 50_000},
    "CIFAR-10": {"source": "cifar10", "train": 50_000, "test": 10_000},
    "Places-205": {"source": "/data/places205"},
    "VOC": {"source": "VOCdevkit"},
    "iNaturalist 2018": {"source": "inat2018"},
    "COCO": {"source": "coco"},
}


def made_run(folder, recipe, results, overrides=None, epoch=None) -> Run:
    """The folder of a finished run of a packaged recipe, with these results, without any training."""
    run, made = Run(folder), load_recipe(recipe, overrides or {})
    run.backbone_file.parent.mkdir(parents=True)
    run.backbone_file.write_bytes(b"weights")
    run.recipe_file.write_text(dump_recipe(made))
    reached = made.training.epochs if epoch is None else epoch
    run.metrics_file.write_text(json.dumps({"step": 1, "epoch": float(reached), "loss": 1.0}) + "\n")
    kept = {"checkpoint": digest(run.backbone_file), "settings": {}, "seconds": 1.0, "seed": 0}
    run.results_file.write_text("".join(json.dumps(kept | result) + "\n" for result in results))
    return run


def result(protocol, metric, data, value=50.0, **settings) -> dict:
    settings = SETTINGS.get(protocol, {}) | settings
    return {"protocol": protocol, "numbers": {"trained": {metric: value}}, "data": data, "settings": settings}


def found(*runs):
    """The rows beside runs: table, row, value, epochs, batch size, and differences."""
    groups = grouped(read_records([run.folder for run in runs]))
    return [
        (table.name, row.row, row.value, row.epochs, row.batch, row.differences)
        for table in beside_published(groups)
        for row in table.rows
    ]


# --- the data


def rows():
    return [(table, row) for table in published()["tables"] for row in table["rows"]]


def test_every_table_says_how_and_where_and_every_row_its_epochs_and_batch():
    tables = published()["tables"]
    assert len({table["name"] for table in tables}) == len(tables)
    for table in tables:
        assert table["protocol"] and "https://" in table["source"]
        assert table["measure"] in published()["measures"]
        assert {table["data"], table.get("tested", table["data"])} <= published()["data"].keys()
    for _, row in rows():
        assert 0 < row["value"] < 100
        assert {"epochs", "batch", "is"} <= row.keys()
        assert (row["epochs"] is None) == (row["batch"] is None)


def test_the_papers_results_of_tico():
    tico = {table["name"]: row["value"] for table, row in rows() if row["name"] == "TiCo" and "TiCo" in table["name"]}
    assert list(tico.values()) == [73.4, 53.0, 66.8, 54.0, 86.5, 45.1, 56.2, 37.4, 34.5]


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        (
            "ImageNet",
            ["imagenet", "/data/ImageNet/", "ILSVRC2012", "imagenet-1k", "imagenet_packed.tico", "in/imagenet1k/train"],
            ["tiny-imagenet", "tiny_imagenet", "tinyimagenet", "imagenet100", "imagenet-100", "imagenette", "photos"],
        ),
        ("CIFAR-10", ["cifar10", "cifar-10-batches-py", "/x/cifar10.npz"], ["cifar100", "cifar-100", "stl10"]),
    ],
)
def test_a_data_set_is_told_from_its_relatives(tmp_path, name, yes, no):
    metric = {"ImageNet": ("imagenet/simclr", DATA["ImageNet"]), "CIFAR-10": ("cifar10/simclr", DATA["CIFAR-10"])}
    recipe, data = metric[name]
    for number, source in enumerate([*yes, *no]):
        linear = result("linear", "top1", data | {"source": source})
        run = made_run(tmp_path / str(number), recipe, [linear], {"data.source": source})
        assert bool(found(run)) == (source in yes), source


# --- every row is found by the run that it describes


def run_of(folder, table, row):
    """A run with exactly the settings of a row."""
    method = row["is"]["method.name"]
    small = table["data"] == "CIFAR-10"
    home = "cifar10" if small else "imagenet"
    name = f"{home}/moco" if row["is"].get("method.head") == "linear" else f"{home}/moco-v2"
    name = name if method == "moco" else f"{home}/{method}"
    overrides = {key: value for key, value in row["is"].items() if "." in key and key != "method.name"}
    overrides |= {"training.epochs": row["epochs"] or 77, "training.batch_size": row["batch"] or 64}
    optimizer = row.get("with", {})
    overrides |= {} if optimizer.get("optimizer.name") == "adam" else optimizer  # which is not offered here
    if method == "moco":
        overrides["method.queue"] = 64 * overrides["training.batch_size"]
    if row["is"].get("crops") == 2:
        overrides["views"] = "swav-2x224"
    for operation in ("jitter", "greyscale", "blur", "solarise"):
        if row["is"].get(operation) is False:
            overrides[f"views.*.{operation}"] = 0.0
    protocol, metric = published()["measures"][table["measure"]][0]
    evaluated = table.get("evaluation", {})
    settings = {} if "voters" in evaluated else evaluated
    data = DATA[table.get("tested", table["data"])]
    return made_run(folder, name, [result(protocol, metric, data, **settings)], overrides)


@pytest.mark.parametrize(("table", "row"), rows(), ids=lambda value: str(value.get("name")))
def test_a_run_with_the_settings_of_a_row_is_beside_it(tmp_path, table, row):
    (one,) = found(run_of(tmp_path / "run", table, row))
    assert one[2:5] == (row["value"], row["epochs"], row["batch"])
    assert one[:2] == (table["name"], row["name"])
    assert "here" not in table or one[5] == []


# --- and no run by another


@pytest.mark.parametrize(
    ("recipe", "overrides", "value"),
    [
        ("imagenet/swav", {}, 75.3),
        ("imagenet/swav", {"views": "swav-2x224"}, 71.8),
        ("imagenet/swav", {"training.epochs": 100}, 72.1),
        ("imagenet/swav", {"training.epochs": 100, "training.batch_size": 256}, 67.2),
        ("imagenet/swav", {"training.epochs": 390, "training.batch_size": 256}, 74.3),
        ("imagenet/swav", {"views.1.count": 4}, None),  # six crops: no such row
        ("imagenet/swav", {"backbone.name": "timm/resnet50"}, 75.3),
        ("imagenet/swav", {"backbone.name": "torchvision/resnet18"}, None),
        ("imagenet/swav", {"data.source": "cifar10"}, None),
        ("imagenet/moco", {}, 60.6),
        ("imagenet/moco-v2", {}, 71.1),
        ("imagenet/moco-v2", {"training.epochs": 200}, 67.5),
        ("imagenet/moco-v2", {"method.symmetric": True}, None),
        ("imagenet/simsiam", {"training.epochs": 100}, 68.3),
        ("imagenet/tico", {}, 73.4),
        ("imagenet/tico", {"backbone.weight_standardisation": False}, 73.2),
        ("imagenet/tico-300", {}, 71.4),
        ("imagenet/tico-300", {"views.*.greyscale": 0.0}, 68.0),
        ("imagenet/squared-contrastive", {}, None),
    ],
)
def test_imagenet_rows_depend_on_crops_epochs_batch_and_backbone(tmp_path, recipe, overrides, value):
    run = made_run(tmp_path / "run", recipe, [result("linear-augmented", "top1", DATA["ImageNet"])], overrides)
    assert [one[2] for one in found(run)] == ([] if value is None else [value])


@pytest.mark.parametrize(
    ("recipe", "overrides", "knn", "linear"),
    [
        ("cifar10/simclr", {}, 87.9, 90.74),
        ("cifar10/simclr", {"training.epochs": 200, "training.batch_size": 512}, 84.8, 90.74),
        ("cifar10/byol", {"training.epochs": 200, "training.batch_size": 128}, 86.9, 92.58),
        ("cifar10/vicreg", {"training.epochs": 300}, None, 90.12),
        ("cifar10/vicreg", {}, None, 92.07),
        ("cifar10/moco", {}, 82.6, None),
        ("cifar10/moco-v2", {"training.epochs": 800}, 89.9, 92.94),
        ("cifar10/swav-multicrop", {}, None, None),
        ("cifar10/tico", {}, None, None),
        ("cifar10/simclr", {"data.source": "cifar100"}, None, None),
    ],
)
def test_cifar10_rows_depend_on_the_evaluation_too(tmp_path, recipe, overrides, knn, linear):
    results = [result("knn", "top1_k200", DATA["CIFAR-10"]), result("linear", "top1", DATA["CIFAR-10"])]
    shown = {one[2] for one in found(made_run(tmp_path / "run", recipe, results, overrides))}
    assert shown == {value for value in (knn, linear) if value is not None}


def test_a_result_on_other_images_or_by_other_settings_has_no_row(tmp_path):
    elsewhere = result("linear-augmented", "top1", DATA["CIFAR-10"])
    assert found(made_run(tmp_path / "a", "imagenet/byol", [elsewhere])) == []
    warm = result("knn", "top1_k200", DATA["CIFAR-10"], voters=[{"k": 200, "temperature": 0.07}])
    assert found(made_run(tmp_path / "b", "cifar10/byol", [warm])) == []
    pyramid = result("detection", "box_ap", DATA["VOC"])
    assert found(made_run(tmp_path / "c", "imagenet/moco-v2", [pyramid])) == []  # published with C4
    scratch = result("semi-supervised", "top1_1%", DATA["ImageNet"])
    assert found(made_run(tmp_path / "d", "imagenet/supervised", [scratch])) == []  # 25.4 is without pretraining


def test_differences_are_said_and_epochs_are_those_trained(tmp_path):
    data = DATA["CIFAR-10"] | {"test": 2_000}
    overrides = {"data.limit": 5_000, "data.image_size": 40, "training.batch_size": 64, "optimizer.name": "sgd"}
    overrides["optimizer.weight_decay"] = 5e-4
    run = made_run(tmp_path / "run", "cifar10/simclr", [result("linear", "top1", data)], overrides, epoch=30)
    (table,) = beside_published(grouped(read_records([run.folder])))
    (row,) = table.rows
    assert (row.value, row.epochs, row.batch, row.our_epochs, row.our_batch) == (90.74, 1000, 256, 30, 64)
    assert row.differences == [
        "optimiser: sgd instead of lars",
        "weight decay: 0.0005 instead of 1e-05",
        "images of 40 pixels instead of 32",
        "pretrained on 5,000 images",
        "ours: a linear classifier on features of unaugmented images, fitted by L-BFGS",
        "evaluated with 2,000 test images instead of 10,000",
    ]


def test_a_seed_that_is_not_evaluated_yet_does_not_hide_the_others(tmp_path):
    linear = result("linear", "top1", DATA["CIFAR-10"])
    runs = [
        made_run(tmp_path / f"byol-seed{seed}", "cifar10/byol", found_, {"training.seed": seed})
        for seed, found_ in enumerate(([], [linear]))
    ]
    assert [one[2] for one in found(*runs)] == [92.58]


def test_an_ablation_stands_beside_its_repetition_on_other_data_and_one_run_does_not(tmp_path):
    changes = {
        "baseline": {},
        "grey": {"views.*.greyscale": 0.0},
        "crop": {"views.*.greyscale": 0.0, "views.*.jitter": 0.0, "views.*.solarise": 0.0, "views.*.blur": 0.0},
    }
    linear = result("linear", "top1", DATA["CIFAR-10"])
    runs = [made_run(tmp_path / name, "cifar10/tico", [linear], change) for name, change in changes.items()]
    assert [one[1:3] for one in found(*runs)] == [("Baseline", 71.4), ("No greyscale", 68.0), ("Crop only", 60.1)]
    assert "data: cifar10 instead of ImageNet" in found(*runs)[0][5]
    assert "backbone: resnet18 instead of resnet50" in found(*runs)[0][5]
    assert found(runs[0]) == []


def test_reports_of_one_run_and_of_several_show_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(static, "save", lambda *_: [])
    knn = result("knn", "top1_k200", DATA["CIFAR-10"], 83.21)
    short = {"training.epochs": 200, "training.batch_size": 512}
    runs = [made_run(tmp_path / name, f"cifar10/{name}", [knn], short) for name in ("simclr", "byol")]
    alone, both = report(runs[0].folder, points=0), report([run.folder for run in runs], tmp_path / "both")
    for text, numbers in ((alone.read_text(), ("84.8",)), (both.read_text(), ("84.8", "86.8"))):
        assert "Published results" in text and "lightly, CIFAR-10 benchmark" in text
        assert all(f">{number}<" in text for number in (*numbers, "83.2"))
        assert text.count(">512<") >= 2 * len(numbers)  # both batch sizes, each of its own run
