"""Splits and classes are those that the data have: in folders, in packed files, and in all that is made of them."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize
from typer.testing import CliRunner

from tico_ssl import embed, evaluate, load_backbone, pretrain
from tico_ssl.classifying.held_out import own_validation
from tico_ssl.cli import app
from tico_ssl.config.sections import BackboneConfig, DataConfig
from tico_ssl.data.formats import splits
from tico_ssl.data.formats.packed import open_packed
from tico_ssl.data.source import Reduced, Source, joined
from tico_ssl.data.sources import open_source
from tico_ssl.data.splits import open_splits, together
from tico_ssl.evaluations._context import open_context
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError
from tico_ssl.views.centre import packing_side

SIDE = 20  # shorter side of the photos, in pixels
COUNTS = {"train": 16, "Test": 6, "valid": 4}


def tico(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def write(path, seed: int = 0, shape=(SIDE, SIDE), **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three splits of two classes, and folders that are neither: without images, hidden, or left by an archive."""
    root = tmp_path_factory.mktemp("data") / "my photos"
    for number, split in enumerate(name for name, count in COUNTS.items() for _ in range(count)):
        shape = (SIDE, SIDE + number % 5) if number % 2 else (SIDE + number % 3, SIDE)
        write(root / split / ("ants" if number % 2 else "bees") / f"{number:02}.png", number, shape)
    write(root / "__MACOSX" / "train" / "._00.png")
    write(root / ".cache" / "00.png")
    (root / "Annotations").mkdir()
    (root / "Annotations" / "00.xml").write_text("<annotation/>")
    return root


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "all.tico"
    tico("data", "pack", photos, out, "--size", SIDE)
    return out


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("backbone") / "b.safetensors"
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w4"), 16), path)
    return path


def source(place, split: str = "train"):
    return open_source(DataConfig(source=str(place)), split)


def parts_of(place, split: str = "all"):
    config = DataConfig(source=str(place))
    return open_splits(config, lambda name: open_source(config, name), split)


# ------------------------------------------------------------------------------------------------------- folders


def test_folders_without_images_are_neither_classes_nor_in_the_way_of_splits(photos):
    assert splits(str(photos)) == {"train": "train", "test": "Test", "val": "valid"}
    for split, name in splits(str(photos)).items():
        found = source(photos, split)
        assert (len(found), found.classes) == (COUNTS[name], ("ants", "bees"))


def test_one_class_in_every_split_is_no_label(tmp_path):
    for split in ("train", "val"):
        write(tmp_path / split / "images" / "1.png")
        assert source(tmp_path, split).labels is None
        assert f"{split:<11}1 image, no labels" in tico("data", "check", tmp_path)


def test_splits_without_training_images_are_no_classes(tmp_path):
    for split in ("val", "test"):
        write(tmp_path / split / "1.png")
    found = source(tmp_path)
    assert (len(found), found.labels, found.classes) == (2, None, ())


def test_a_split_without_images_is_none(tmp_path):
    write(tmp_path / "train" / "1.png")
    (tmp_path / "val" / "empty").mkdir(parents=True)
    assert splits(str(tmp_path)) == {"train": "train"}
    assert source(tmp_path, "test") is None


def test_published_layouts_name_their_splits(tmp_path):
    for split in ("train", "val"):
        write(tmp_path / "imagenet" / split / "n01440764" / "1.png")
        write(tmp_path / "imagenet" / split / "n01443537" / "1.png")
    assert splits(str(tmp_path / "imagenet")) == {"train": "train", "val": "val"}
    assert [part.split for part in parts_of(tmp_path / "imagenet")] == ["train", "val"]
    (tmp_path / "tables").mkdir()
    for name in ("train-0", "validation-0", "test-0"):
        (tmp_path / "tables" / f"{name}.parquet").touch()
    assert list(splits(str(tmp_path / "tables"))) == ["train", "test", "val"]


def test_two_folders_of_one_split_are_an_error(tmp_path):
    for split in ("train", "val", "valid"):
        write(tmp_path / split / "1.png")
    with pytest.raises(UserError, match="val and valid are both called as val images are"):
        source(tmp_path)


def test_splits_may_have_a_number(tmp_path):
    """COCO's folders, and those of some competitions."""
    for name in ("train2017", "val2017", "test_1"):
        write(tmp_path / name / "1.png")
    (tmp_path / "annotations").mkdir()
    assert splits(str(tmp_path)) == {"train": "train2017", "test": "test_1", "val": "val2017"}
    assert source(tmp_path).labels is None
    assert "val        1 image, no labels: to choose by" in tico("data", "check", tmp_path)


def test_folders_beside_several_splits_are_not_left_out_and_no_classes_with_them(tmp_path):
    for name in ("train", "cars"):
        write(tmp_path / name / "1.png")
    assert source(tmp_path).classes == ("cars", "train")  # a class may be called train
    write(tmp_path / "test" / "1.png")
    with pytest.raises(UserError, match="cars holds images and is no split, as train and test beside it are"):
        source(tmp_path)


@pytest.mark.parametrize("masks", ["masks", "Labels"])
def test_masks_are_neither_images_nor_a_class(tmp_path, masks):
    for number in range(3):
        write(tmp_path / "all" / "images" / f"{number}.png", number)
        write(tmp_path / "all" / masks / f"{number}.png")
        write(tmp_path / "split" / "train" / "images" / f"{number}.png")
        write(tmp_path / "split" / "train" / masks / f"{number}.png")
        write(tmp_path / "split" / "val" / "images" / f"{number}.png")
    found = source(tmp_path / "all")
    assert (len(found), found.labels, found.names(2)) == (3, None, "images/2.png")
    for split in ("train", "val"):
        found = source(tmp_path / "split", split)
        assert (len(found), found.labels) == (3, None)
    write(tmp_path / "all" / "more" / "1.png")  # a class of its own
    assert source(tmp_path / "all").classes == tuple(sorted(["images", masks, "more"]))


def test_splits_within_the_folder_of_images_are_found(tmp_path):
    """As many labelling programs write them, with the labels beside."""
    for split, count in (("train", 3), ("val", 2)):
        for number in range(count):
            write(tmp_path / "images" / split / f"{number}.png", number)
        (tmp_path / "labels" / split).mkdir(parents=True)
        (tmp_path / "labels" / split / "0.txt").write_text("0 0.5 0.5 1 1")
    assert splits(str(tmp_path)) == {"train": "images/train", "val": "images/val"}
    tico("data", "pack", tmp_path, tmp_path / "p.tico", "--size", SIDE)
    for place in (tmp_path, tmp_path / "p.tico"):
        assert [(part.split, len(part.source)) for part in parts_of(place)] == [("train", 3), ("val", 2)]
        assert together(parts_of(place)).names(3) == "images/val/0.png"


def test_classes_are_numbered_alike_if_one_of_several_sources_has_no_test_images(tmp_path):
    for place in ("a/train/cats", "a/train/dogs", "a/test/cats", "a/test/dogs", "b/ants", "b/bees"):
        write(tmp_path / place / "1.png")
    config = DataConfig(source=[str(tmp_path / "a"), str(tmp_path / "b")])
    train, test = (open_source(config, split) for split in ("train", "test"))
    assert train.classes == test.classes == ("ants", "bees", "cats", "dogs")
    assert [test.classes[label] for label in test.labels] == ["cats", "dogs"]


def test_folders_of_annotations_are_no_classes_in_any_command(tmp_path, tiny, backbone, capsys):
    root = tmp_path / "cells"
    for number in range(8):
        write(root / "JPEGImages" / f"{number}.png", number)
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{number}.xml").write_text("<annotation/>")
    (root / "ImageSets").mkdir()
    assert "train      8 images, no labels" in tico("data", "check", root)
    settings = tiny | {"data.limit": None, "training.batch_size": 4, "training.epochs": 1}
    pretrain("demo", data=root, out=tmp_path / "run", overrides=settings | {"optimizer.warmup_epochs": 10})
    said = capsys.readouterr().out
    assert "8 images (no labels)" in said
    assert "a warm-up of 10 epochs is too long for a run of 1" in said
    with np.load(embed(backbone, str(root), tmp_path / "f.npz")) as table:
        assert "labels" not in table and table["splits"].tolist() == ["train"] * 8
    with pytest.raises(UserError, match=r"knn needs labels: .* \(see data=\)"):
        evaluate(backbone, "knn", str(root))


# --------------------------------------------------------------------------------------------------------- check


def test_check_says_what_is_in_every_split(photos):
    text = tico("data", "check", photos)
    assert "26 files" in text
    for line in ("train      16 images, 2 classes: to pretrain on", "test       6 images", "val        4 images"):
        assert line in text
    assert "4 files" in tico("data", "check", photos, "--split", "val")


def test_copies_in_another_split_are_named_with_it(tmp_path):
    write(tmp_path / "train" / "1.png")
    write(tmp_path / "val" / "1.png")
    assert "train/1.png = val/1.png" in tico("data", "check", tmp_path)


def test_a_split_that_is_none_is_refused(photos):
    with pytest.raises(UserError, match="did you mean 'val'"):
        tico("data", "check", photos, "--split", "vall")
    with pytest.raises(UserError, match="has no split test, only train"):
        tico("data", "pack", photos / "train", "x.tico", "--split", "test")


# ---------------------------------------------------------------------------------------------------------- pack


@pytest.mark.parametrize("split", ["train", "test", "val"])
def test_a_packed_file_keeps_the_splits(photos, packed, split):
    folder, file = source(photos, split), source(packed, split)
    assert (len(file), file.name, file.classes) == (len(folder), folder.name, folder.classes)
    assert file.labels.tolist() == folder.labels.tolist()
    assert [file.names(i) for i in range(len(file))] == [folder.names(i) for i in range(len(folder))]
    assert splits(str(packed)) == splits(str(photos))
    assert [part.folder for part in parts_of(packed)] == [part.folder for part in parts_of(photos)]


def test_a_packed_file_evaluates_like_the_folder(photos, packed, backbone):
    """To the digit, if the shorter side of the photos is that of the file."""
    results = [
        evaluate(backbone, "knn", str(place), {"voters": [{"k": 3, "temperature": 0.1}]}) for place in (photos, packed)
    ]
    numbers = [{name: result.numbers[name] for name in ("trained", "untrained")} for result in results]
    assert numbers[0] == numbers[1]
    assert [result.data["split"] for result in results] == ["the data's own"] * 2
    assert [(result.data["train"], result.data["test"]) for result in results] == [(16, 6)] * 2


def test_a_classifier_is_chosen_by_the_same_images(photos, packed, backbone):
    found = [own_validation(open_context(backbone, str(place)), ("ants", "bees")) for place in (photos, packed)]
    assert [one.labels.tolist() for one in found] == [[0, 0, 1, 1]] * 2


def test_one_split_is_packed_alone(photos, tmp_path):
    tico("data", "pack", photos, tmp_path / "val.tico", "--size", SIDE, "--split", "val", "--jpeg")
    assert len(source(tmp_path / "val.tico")) == COUNTS["valid"]
    assert source(tmp_path / "val.tico", "test") is None


def test_bad_files_and_unlabelled_splits_keep_the_others_in_place(tmp_path):
    root = tmp_path / "images"
    for name in ("train/a/1.png", "train/b/2.png", "test/3.png", "test/4.png", "val/a/5.png"):
        write(root / name, len(name))
    (root / "train" / "a" / "0.png").write_text("no image")
    (root / "val" / "a" / "5.png").write_text("no image")
    text = tico("data", "pack", root, tmp_path / "x.tico", "--size", "8")
    for name in ("train/a/0.png", "val/a/5.png"):
        assert f"left out {name}: " in text
    assert splits(str(tmp_path / "x.tico")) == {"train": "train", "test": "test"}
    train, test = source(tmp_path / "x.tico"), source(tmp_path / "x.tico", "test")
    assert (train.labels.tolist(), train.names(0)) == ([0, 1], "a/1.png")
    assert (test.labels, test.classes, test.names(1)) == (None, (), "4.png")


def test_splits_that_do_not_add_up_are_damage(packed, tmp_path, monkeypatch):
    from tico_ssl.data.formats import packed as format

    monkeypatch.setattr(format, "split_called", lambda name: "train")
    with pytest.raises(UserError, match=r"damaged \(splits\)"):
        source(packed)


def test_arrays_have_their_validation_images_too(tmp_path):
    images = {f"x_{name}": np.full((count, 8, 8, 3), count, np.uint8) for name, count in (("train", 3), ("val", 2))}
    np.savez(tmp_path / "a.npz", **images)
    assert [(part.split, len(part.source)) for part in parts_of(tmp_path / "a.npz")] == [("train", 3), ("val", 2)]
    assert len(source(tmp_path / "a.npz", "test")) == 2
    whole = together(parts_of(tmp_path / "a.npz"))
    assert [whole.names(i) for i in (0, 3)] == ["train/0", "val/0"]


# --------------------------------------------------------------------------------------------------------- embed


def test_embed_gives_the_same_table_of_a_packed_file(photos, packed, backbone, tmp_path):
    tables = []
    for number, place in enumerate((photos, packed)):
        with embed(backbone, str(place), tmp_path / f"{number}.csv").open() as file:
            tables.append([list(row.items())[:4] for row in csv.DictReader(file)])
    assert tables[0] == tables[1]
    assert dict(tables[0][0]) == {"path": "train/ants/01.png", "split": "train", "label": "0", "class": "ants"}


def test_embed_gives_the_features_of_the_backbone_also_of_large_jpegs(backbone, tmp_path):
    """Their cosine is 1 but for the error of floats: neither of the two decodes at a fraction of the size."""
    for number in range(3):
        write(tmp_path / "photos" / f"{number}.jpg", number, (400, 300), quality=90)
    (tmp_path / "photos" / "bad.jpg").write_text("no image")
    with np.load(embed(backbone, str(tmp_path / "photos"), tmp_path / "f.npz")) as table:
        names, found = table["names"].tolist(), torch.from_numpy(table["features"])
    assert names == ["0.jpg", "1.jpg", "2.jpg"]
    network = load_backbone(backbone)
    with torch.no_grad():
        expected = network(network.preprocess([tmp_path / "photos" / name for name in names]))
    assert (torch.cosine_similarity(found.double(), expected.double()) - 1).abs().max() < 1e-6
    left_out = json.loads((tmp_path / "f.npz.bad_files.jsonl").read_text())
    assert left_out["file"] == "bad.jpg" and left_out["reason"]


def test_a_recipe_holds_out_the_same_training_images_for_every_seed(tmp_path, tiny):
    """Of every class a quarter; nothing of them is trained on, and of the test images nothing is looked at."""
    pixels = np.arange(56, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2).repeat(3, 3)
    arrays = {"x_train": pixels[:48], "y_train": np.arange(48) % 4, "x_test": pixels[48:], "y_test": np.arange(8) % 4}
    np.savez(tmp_path / "data.npz", **arrays)
    config = DataConfig(source=str(tmp_path / "data.npz"), held_out=0.25)
    train, test = open_source(config), open_source(config, "test")
    assert train is not None
    assert test is not None
    seen, kept = (source.take(torch.arange(len(source)))[:, 0, 0, 0].tolist() for source in (train, test))
    assert (len(seen), len(kept)) == (36, 12)
    assert sorted(seen + kept) == list(range(48))
    assert test.labels is not None
    assert test.labels.bincount().tolist() == [3, 3, 3, 3]
    settings = tiny | {"data.held_out": 0.25, "training.batch_size": 8}
    runs = [
        pretrain("demo", config.source, tmp_path / f"{seed}", settings | {"training.seed": seed}) for seed in (0, 1)
    ]
    results = [evaluate(run.folder, "knn") for run in runs]
    assert len({result.images for result in results}) == 1
    assert results[0].data["test"] == 12
    assert results[0].data["split"] == "25% of the training images, held out of pretraining"


# ------------------------------------------------------------------------------------------------- smaller packed files


def test_a_packed_file_that_is_too_small_says_so_and_one_that_is_large_enough_does_not(tmp_path, backbone, capsys):
    """A network for 16 pixels takes the central 7/8 of images of 19 or more: at the least multiple of 16 that has them
    features are nearly those of the photos, at the size of the network they are those of another view."""
    generator = np.random.default_rng(0)
    for number in range(24):
        coarse = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        path = tmp_path / "photos" / ("train" if number % 3 else "test") / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((64, 48), Image.Resampling.BICUBIC).save(path)
    centred, lines = {}, {}
    for size in (None, 48, packing_side(16), 16):
        place = tmp_path / "photos" if size is None else tmp_path / f"{size}.tico"
        if size is not None:
            tico("data", "pack", tmp_path / "photos", place, "--size", size)
        capsys.readouterr()
        context = open_context(backbone, str(place))
        lines[size], features = capsys.readouterr().out, context.features("trained").test
        centred[size] = normalize(features - features.mean(0), dim=1)
        assert ("packed" in context.data) == (size == 16)
    likeness = {size: float((centred[None] * one).sum(1).mean()) for size, one in centred.items()}
    assert packing_side(16) == 32
    assert torch.equal(centred[48], centred[None])
    assert likeness[32] > 0.99 > likeness[16] + 0.04
    assert not any(lines[size] for size in (None, 48, 32))
    assert "reduced from 48 to 16 pixels by packing, but a network for 16 needs 19" in lines[16]
    assert "not comparable" in lines[16]
    assert "--size 32`" in lines[16]


def test_of_several_packed_files_the_smallest_is_told():
    whole, large, small = (
        Source("x", 1, torch.zeros, reduced=reduced) for reduced in (None, Reduced(200, 300), Reduced(64, 500))
    )
    assert joined([whole, large, small]).reduced == (64, 500)
    assert joined([whole, whole]).reduced is None


def test_packing_says_what_is_lost_and_what_is_wasted(tmp_path):
    """Against the image size of the recipe that it proposes. Images that never had more have lost nothing."""
    for number in range(4):
        write(tmp_path / "large" / f"{number}.png", number, (120, 130))
        write(tmp_path / "small" / f"{number}.png", number, (32, 32))
    assert "is reduced from 120 to 64 pixels by packing" in tico(
        "data", "pack", tmp_path / "large", tmp_path / "a.tico", "--size", 64
    )
    assert "warning" not in tico("data", "pack", tmp_path / "small", tmp_path / "b.tico", "--size", 32)
    again = tico("data", "pack", tmp_path / "a.tico", tmp_path / "c.tico", "--size", 34)
    assert "reduced from 120 to 34 pixels by packing" in again
    enlarged = tico("data", "pack", tmp_path / "small", tmp_path / "d.tico", "--size", 48)
    assert "images of 32 pixels were enlarged: --size 32 keeps their pixels, in less space" in enlarged
    assert "data.image_size=32" in enlarged


def test_packing_keeps_the_pixels_of_small_images_and_usual_sizes_of_large_ones(tmp_path):
    """Where no --size is given: images are not enlarged, nor reduced below what evaluations usually take."""
    for number, size in enumerate([(40, 52), (47, 36), (30, 60)]):
        write(tmp_path / "small" / f"{number}.png", number, size)
    write(tmp_path / "large" / "train" / "0.png", 0, (120, 130))
    write(tmp_path / "large" / "test" / "0.png", 0, (300, 310))
    for name, side in [("small", 40), ("large", 256)]:
        assert "enlarged" not in tico("data", "pack", tmp_path / name, tmp_path / f"{name}.tico")
        assert open_packed(tmp_path / f"{name}.tico").images.shape[-2:] == (side, side)
    tico("data", "pack", tmp_path / "small.tico", tmp_path / "again.tico")
    assert torch.equal(open_packed(tmp_path / "again.tico").images, open_packed(tmp_path / "small.tico").images)
