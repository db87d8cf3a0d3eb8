"""Detection and segmentation: data in the real layouts, scores worked out by hand and by pycocotools, networks by
closed forms, and training that learns, goes on to the bit, and is shared by processes."""

import json
import math
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from PIL import Image

pytest.importorskip("pycocotools")
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tico_ssl import evaluate
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.evaluations._detection import training
from tico_ssl.evaluations._detection.drawing import found_marks, save_sheet
from tico_ssl.evaluations._detection.heads import AlignedPool, cut_out, mask_loss, numbered
from tico_ssl.evaluations._detection.network import build_detector
from tico_ssl.evaluations._detection.outlines import _runs, pasted, pixels, require_outline
from tico_ssl.evaluations._detection.pictures import Instance, Picture, Pictures
from tico_ssl.evaluations._detection.predicting import find_objects
from tico_ssl.evaluations._detection.protocol import _name, open_picture_context, scheduled
from tico_ssl.evaluations._detection.samples import Batch, Maker, Task, TrainingSamples, mirrored, resized_shape
from tico_ssl.evaluations._detection.scoring import (
    Found,
    average_precision,
    coco_scores,
    inclusive_overlap,
    score,
    voc_ap,
    voc_matches,
)
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.evaluations._detection.splits import open_pictures
from tico_ssl.evaluations._detection.training import Job, make_detector, make_optimizer, train
from tico_ssl.evaluations.detection import Config as DetectionConfig
from tico_ssl.evaluations.segmentation import Config as SegmentationConfig
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime import distributed
from tico_ssl.runtime.errors import UserError

COLOURS = {3: (220, 30, 30), 7: (30, 200, 30), 90: (40, 60, 230)}  # by category: numbers with gaps, as COCO's
SMALL = {
    "iterations": 8,
    "batch_size": 4,
    "warmup_iterations": 2,
    "lr": 0.02,
    "sizes": (64, 72),
    "test_size": 64,
    "longest": 128,
    "anchor_scale": 4.0,
    "width": 16,
    "proposals": 40,
    "regions": 32,
    "precise_norm": 2,
    "log_every": 1,
    "precision": "fp32",
    "workers": 1,
    "drawn": 2,
}


def coloured_rectangles(number: int):
    """An image of grey noise with one to three coloured rectangles, whole pixels, drawn by a number."""
    random = np.random.default_rng(number)
    height, width = (64, 80) if number % 2 else (80, 64)
    image = random.integers(90, 130, (height, width, 3), dtype=np.uint8)
    boxes = []
    for category in random.permutation(list(COLOURS))[: 1 + number % 3].tolist():
        w, h = random.integers(18, 34, 2).tolist()
        x, y = int(random.integers(0, width - w)), int(random.integers(0, height - h))
        image[y : y + h, x : x + w] = COLOURS[category]
        boxes.append((category, x, y, w, h))
    return image, boxes


def write_coco(root, train: int = 8, val: int = 4):
    """A folder in COCO's layout: polygons, both kinds of run-length encodings, a crowd, an image without objects."""
    (root / "annotations").mkdir(parents=True)
    for split, numbers in (("train2017", range(train)), ("val2017", range(100, 100 + val))):
        (root / split).mkdir()
        images, annotations = [], []
        for number in numbers:
            pixels_, boxes = coloured_rectangles(number)
            height, width = pixels_.shape[:2]
            Image.fromarray(pixels_).save(root / split / f"{number:012d}.png")
            images.append({"id": 7 * number + 1, "file_name": f"{number:012d}.png", "width": width, "height": height})
            for place, (category, x, y, w, h) in enumerate(boxes):
                filled = np.zeros((height, width), dtype=np.uint8)
                filled[y : y + h, x : x + w] = 1
                code = coco_mask.encode(np.asfortranarray(filled))
                outlines = [
                    [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    {"size": code["size"], "counts": code["counts"].decode()},
                    {"size": [height, width], "counts": column_runs(filled)},
                ]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": 7 * number + 1,
                        "category_id": category,
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": int(number % 4 == 3 and place == 1),
                        "segmentation": outlines[place],
                    }
                )
        Image.new("RGB", (50, 40)).save(root / split / "empty.png")
        images.append({"id": 5000, "file_name": "empty.png", "width": 50, "height": 40})
        categories = [{"id": number, "name": f"colour {number}"} for number in (90, 3, 7)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def column_runs(filled):
    """COCO's uncompressed code: lengths of runs, column by column, beginning with zeros."""
    flat = filled.ravel(order="F")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
    return np.diff(np.concatenate([[0], edges])).tolist()


def write_voc(root, year: str, splits: dict[str, range]):
    home = root / year
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (home / folder).mkdir(parents=True)
    names = dict(zip(COLOURS, ("aeroplane", "cat", "tvmonitor")))
    for split, numbers in splits.items():
        for number in numbers:
            image, boxes = coloured_rectangles(number)
            Image.fromarray(image).save(home / "JPEGImages" / f"{number:06d}.jpg")
            objects = "".join(
                f"<object><name>{names[category]}</name><difficult>{place % 2}</difficult><bndbox><xmin>{x + 1}</xmin>"
                f"<ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
                for place, (category, x, y, w, h) in enumerate(boxes)
            )
            size = f"<size><width>{image.shape[1]}</width><height>{image.shape[0]}</height><depth>3</depth></size>"
            (home / "Annotations" / f"{number:06d}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
        (home / "ImageSets/Main" / f"{split}.txt").write_text("".join(f"{number:06d}\n" for number in numbers))
    return root


def small_backbone(stem: str = "standard", name: str = "tico/resnet10-w8", mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2)):
    torch.manual_seed(0)
    return build_backbone(BackboneConfig(name=name, stem=stem, zero_gamma=False), 64, mean, std)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("data") / "coco")


@pytest.fixture(scope="module")
def splits(coco):
    return open_pictures(coco, seed=0)


# --- what is in a folder


def test_coco_layout_with_gaps_crowds_codes_and_empty_images(coco, splits):
    assert splits.how == "the data's own"
    assert splits.train.classes == ("colour 3", "colour 7", "colour 90")
    assert len(splits.train) == 8  # the image without objects is nothing to train on
    assert len(splits.test) == 5 and splits.test.pictures[-1].instances == ()
    for number, picture in enumerate(splits.train.pictures):
        _, boxes = coloured_rectangles(number)
        for place, (instance, (category, x, y, w, h)) in enumerate(zip(picture.instances, boxes, strict=True)):
            assert instance.label == list(COLOURS).index(category) + 1
            assert instance.box == (x, y, x + w, y + h)
            assert instance.crowd == (number % 4 == 3 and place == 1)
            inside = pixels(instance.outline, (picture.height, picture.width), (picture.height, picture.width))
            assert inside.sum() == w * h and inside[y : y + h, x : x + w].all()
    trained_on = sum(len(picture.trainable()) for picture in splits.train.pictures)
    assert trained_on == sum(1 + number % 3 for number in range(8)) - 1  # without the crowd in the last image


def test_voc_layout_of_both_years(tmp_path):
    root = tmp_path / "VOCdevkit"
    write_voc(root, "VOC2007", {"trainval": range(3), "test": range(20, 23)})
    write_voc(root, "VOC2012", {"trainval": range(5, 7)})
    for given in (root, tmp_path, root / "VOC2007"):
        train_, test, _ = open_pictures(given, seed=0)
        assert (len(train_), len(test), test.rule) == (5, 3, "voc2007")
    assert len(train_.classes) == 20
    _, boxes = coloured_rectangles(2)
    for place, (instance, (_, x, y, w, h)) in enumerate(zip(train_.pictures[2].instances, boxes, strict=True)):
        assert instance.box == (x, y, x + w, y + h)  # from the first pixel, number 1, to the last, which belongs to it
        assert instance.difficult == bool(place % 2)
    assert len(train_.pictures[2].trainable()) == len(boxes)  # difficult objects are trained on
    (root / "VOC2007/ImageSets/Main/test.txt").unlink()
    (root / "VOC2012/ImageSets/Main/train.txt").write_text("000005\n")
    (root / "VOC2012/ImageSets/Main/val.txt").write_text("000006\n")
    train_, test, _ = open_pictures(root, seed=0)
    assert (len(train_), len(test), test.rule) == (1, 1, "voc")


def renamed(home, names: dict[str, str]) -> None:
    for file in (home / "Annotations").iterdir():
        text = file.read_text()
        for old, new in names.items():
            text = text.replace(f"<name>{old}</name>", f"<name>{new}</name>")
        file.write_text(text)


CELLS = {"aeroplane": "RBC", "cat": "Platelets", "tvmonitor": "WBC"}


def test_other_classes_in_the_layout_of_voc(tmp_path):
    home = write_voc(tmp_path, "cells", {"trainval": range(6), "test": range(20, 23)}) / "cells"
    renamed(home, CELLS)
    for file in (home / "JPEGImages").glob("00000*.jpg"):
        Image.open(file).save(file.with_suffix(".png"))
        file.unlink()
    train_, test, how = open_pictures(home, seed=0)
    assert (len(train_), len(test), test.rule, how) == (6, 3, "voc", "the data's own")
    assert train_.classes == test.classes == ("Platelets", "RBC", "WBC")
    _, boxes = coloured_rectangles(2)
    order = {3: "RBC", 7: "Platelets", 90: "WBC"}
    found = [train_.classes[instance.label - 1] for instance in train_.pictures[2].instances]
    assert found == [order[category] for category, *_ in boxes]
    (home / "ImageSets/Main/test.txt").unlink()
    assert "held out" in open_pictures(home, seed=0).how
    (home / "ImageSets/Main/trainval.txt").unlink()
    splits = open_pictures(home, seed=0)
    assert len(splits.train) + len(splits.test) == 9
    renamed(home, {"RBC": "cat"})
    assert open_pictures(home, seed=0).train.classes == ("Platelets", "WBC", "cat")
    home.rename(tmp_path / "VOC2007")
    (tmp_path / "VOC2007/ImageSets/Main/train.txt").write_text("000001\n")
    (tmp_path / "VOC2007/ImageSets/Main/val.txt").write_text("000002\n")
    renamed(tmp_path / "VOC2007", {"cat": "RBC"})
    assert open_pictures(tmp_path, seed=0).train.classes == ("Platelets", "RBC", "WBC")


def test_deep_images_are_mapped_by_the_range_of_the_backbone(tmp_path):
    ramp = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    sample = Maker(1, 128, masks=False, limits=(0.0, 4095.0))(Task(Picture(tmp_path / "x.png", 64, 64, ()), 64, False))
    assert np.array_equal(sample.image[0].numpy(), np.rint(ramp / 4095 * 255))


def test_one_coco_file_for_all_images(tmp_path):
    root = write_coco(tmp_path / "coco", train=9)
    (root / "annotations/instances_train2017.json").rename(root / "train2017/annotations.json")
    train_, _, how = open_pictures(root / "train2017", seed=3)
    assert train_.classes == ("colour 3", "colour 7", "colour 90")
    assert "held out" in how


def test_without_a_test_split_images_are_held_out(tmp_path):
    root = write_coco(tmp_path / "coco", train=9)
    (root / "annotations/instances_val2017.json").unlink()
    train_, test, how = open_pictures(root, seed=3)
    assert len(test) == 2 and "held out by seed 3" in how
    assert not {p.file for p in train_.pictures} & {p.file for p in test.pictures}


def change(root, edit, split="train2017"):
    path = root / f"annotations/instances_{split}.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_changed_annotations_and_images_are_other_data(coco):
    before = open_pictures(coco, 0).test
    (first, *others) = before.pictures
    instances = list(first.instances) or [Instance(1, (0.0, 0.0, 9.0, 9.0))]
    moved = instances[0]._replace(box=(1.0, 1.0, 8.0, 8.0))
    outlined = instances[0]._replace(outline=[[0, 0, 9, 0, 9, 9.5]])
    changed = [
        first._replace(instances=(moved, *instances[1:])),
        first._replace(instances=(outlined, *instances[1:])),
        first._replace(width=first.width + 1),
        first._replace(file=others[0].file),
    ]
    found = {replace(before, pictures=[one, *others]).fingerprint() for one in changed}
    found |= {replace(before, classes=before.classes[::-1]).fingerprint(), before.first(2).fingerprint()}
    assert len(found | {before.fingerprint()}) == 7
    assert open_pictures(coco, 0).test.fingerprint() == before.fingerprint()


def test_corrected_boxes_are_trained_on_anew(tmp_path, monkeypatch):
    root = tmp_path / "coco"
    write_coco(root, 3, 2)
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    context = open_picture_context(tmp_path / "b.safetensors", str(root))
    names = {_name(context, DetectionConfig())}
    for split in ("train2017", "val2017"):
        change(root, lambda content: content["annotations"][0].update(bbox=[0, 0, 9, 9]), split)
        names.add(_name(open_picture_context(tmp_path / "b.safetensors", str(root)), DetectionConfig()))
    assert len(names) == 3


def test_a_test_file_may_number_its_categories_otherwise(tmp_path):
    root = write_coco(tmp_path / "coco", 3, 3)
    before = open_pictures(root, 0).test.pictures
    other = {3: 50, 7: 3, 90: 7}

    def renumber(content):
        for row in content["categories"]:
            row["id"] = other[row["id"]]
        for row in content["annotations"]:
            row["category_id"] = other[row["category_id"]]
        content["categories"].append({"id": 90, "name": "of no object"})

    change(root, renumber, "val2017")
    assert open_pictures(root, 0).test.pictures == before
    change(root, lambda content: content["annotations"][0].update(category_id=90), "val2017")
    with pytest.raises(UserError, match=r"val2017.json: the training images have no category called 'of no object'"):
        open_pictures(root, 0)


def test_categories_of_one_name_are_known_by_their_ids(tmp_path):
    root = write_coco(tmp_path / "coco", 3, 3)
    before = open_pictures(root, 0).test.pictures
    for split in ("train2017", "val2017"):
        change(root, lambda content: [row.update(name="x") for row in content["categories"]], split)
    assert open_pictures(root, 0).test.pictures == before
    change(root, lambda content: content["categories"][0].update(id=8), "val2017")
    change(root, lambda content: content["annotations"][0].update(category_id=8), "val2017")
    with pytest.raises(UserError, match=r"val2017.json: the training images have several categories called 'x'"):
        open_pictures(root, 0)


def test_a_test_file_without_categories_has_those_of_training(tmp_path):
    root = write_coco(tmp_path / "coco", 3, 3)
    before = open_pictures(root, 0).test.pictures
    change(root, lambda content: content.pop("categories"), "val2017")
    assert open_pictures(root, 0).test.pictures == before


BROKEN = {
    "no such image": lambda root: (root / "train2017/000000000002.png").unlink(),
    "refers to unknown category 4": lambda root: change(root, lambda c: c["annotations"][0].update(category_id=4)),
    "refers to unknown image 99": lambda root: change(root, lambda c: c["annotations"][0].update(image_id=99)),
    "needs a list called 'categories'": lambda root: change(root, lambda c: c.pop("categories")),
    "images[0] needs 'width'": lambda root: change(root, lambda c: c["images"][0].pop("width")),
    "bbox needs": lambda root: change(root, lambda c: c["annotations"][0].update(bbox=[1, 2, 3])),
    "has a number of 401 digits": lambda root: change(
        root, lambda c: c["annotations"][0].update(bbox=[0, 0, 10**400, 1])
    ),
    "width and height, has [nan": lambda root: change(
        root, lambda c: c["annotations"][0].update(bbox=[math.nan, 0, 1, 1])
    ),
    "width and height, has ['1'": lambda root: change(root, lambda c: c["annotations"][0].update(bbox=["1", 0, 1, 1])),
    "iscrowd is 0 or 1, not '0'": lambda root: change(root, lambda c: c["annotations"][0].update(iscrowd="0")),
    "same id": lambda root: change(root, lambda c: c["images"][0].update(id=8)),
    "polygons or a run-length encoding": lambda root: change(
        root, lambda c: c["annotations"][0].update(segmentation="x")
    ),
    "no image has an object": lambda root: change(root, lambda c: c.update(annotations=[])),
    "not JSON": lambda root: (root / "annotations/instances_train2017.json").write_text("{"),
    "neither COCO's layout": lambda root: (root / "annotations/instances_train2017.json").unlink(),
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_wrong_with_a_coco_folder_is_one_line(tmp_path, words):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    BROKEN[words](root)
    with pytest.raises(UserError) as error:
        open_pictures(root, seed=0)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("area", [None, "big", math.nan, [4]])
def test_an_area_that_is_no_number_is_that_of_the_box(tmp_path, area):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    change(root, lambda c: c["annotations"][0].update(bbox=[1, 2, 4, 5], area=area))
    assert open_pictures(root, seed=0).train.pictures[0].instances[0].area == 20


@pytest.mark.parametrize(("given", "crowd"), [(None, False), (0, False), (False, False), (1, True), (True, True)])
def test_a_crowd_is_marked_by_one_or_true(tmp_path, given, crowd):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    change(root, lambda c: c["annotations"][1].update(iscrowd=given))  # one of two objects
    assert open_pictures(root, seed=0).train.pictures[1].instances[0].crowd is crowd


NAN, SIZE = float("nan"), [48, 64]
OUTLINES = {
    "no numbers": ([[0, 0, NAN, 0, 10, 10]], [[0, 0, 1e400, 0, 10, 10]], [["a"] * 6], [[None] * 6]),
    "far outside": ([[0, 0, 1e9, 0, 1e9, 1e9]], [[0, 0, 4e8, 0, 4e8, 4e8]], [[0, 0, 1e300, 0, 1e300, 1e300]]),
    "pixels long": ([[-64, -48, 128, 96] * 5_000],),
    "has the size": ({"size": [64, 48], "counts": [3072]}, {"size": 5, "counts": "a"}),
    "no numbers of pixels": (
        *({"size": SIZE, "counts": counts} for counts in ([5, -3, 3070], ["a"], 7, [[]], [1.5], None)),
        *({"size": SIZE, "counts": text} for text in ("", "PP", "o" * 400, "\udc80\u4e00", "0\0", "5M")),
    ),
    "3,072": ({"size": SIZE, "counts": [1, 100_000_000]}, {"size": SIZE, "counts": [3]}, {"size": SIZE, "counts": "3"}),
}


@pytest.mark.parametrize(("words", "outline"), [(words, one) for words, several in OUTLINES.items() for one in several])
def test_outlines_that_would_end_the_process_are_one_line(words, outline):
    """pycocotools checks nothing: corners far outside are a crash or take all memory, runs of another sum
    are an endless loop."""
    with pytest.raises(ValueError, match=words):
        require_outline(outline, *SIZE)


def test_outlines_are_checked_when_annotations_are_read(tmp_path):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    change(root, lambda content: content["annotations"][1].update(segmentation=[[0, 0, 1e9, 0, 1e9, 1e9]]))
    with pytest.raises(UserError, match=r"annotation .*: segmentation has corners far outside the image"):
        open_pictures(root, seed=0)


def test_runs_written_as_text_are_those_of_pycocotools():
    mask, draw = pytest.importorskip("pycocotools.mask"), np.random.default_rng(0)
    for share in (0.0, 1.0, 0.5, 0.03, 0.002):
        for height, width in ((1, 1), (7, 30), (200, 90)):
            pixels_ = np.asfortranarray(draw.random((height, width)) < share, np.uint8)
            text = mask.encode(pixels_)["counts"].decode()
            require_outline({"size": [height, width], "counts": text}, height, width)
            again = mask.frPyObjects({"size": [height, width], "counts": _runs(text)}, height, width)
            assert np.array_equal(mask.decode(again), pixels_)


def test_a_long_outline_is_refused_at_the_size_at_which_it_is_drawn():
    zigzag = [[*(value for k in range(1_000) for value in ((0, 0) if k % 2 else (60, 60)))]]
    require_outline(zigzag, 64, 64)
    with pytest.raises(ValueError, match="pixels long"):
        pixels(zigzag, (64, 64), (1_333, 1_333))


@pytest.mark.parametrize("text", ["9" * 5_000, "1" + "0" * 400, "-" + "9" * 20])
@pytest.mark.parametrize("key", ["width", "id"])
def test_integers_beyond_64_bits_are_one_line(tmp_path, key, text):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    path = root / "annotations/instances_train2017.json"
    path.write_text(re.sub(rf'"{key}": \d+', f'"{key}": {text}', path.read_text(), count=1))
    with pytest.raises(UserError, match=rf"has a number of \d+ digits, {text[:20]}\.\.\.$"):
        open_pictures(root, seed=0)


@pytest.mark.parametrize("sides", [(0, 48), (-3, 48), (200_000, 200_000)])
def test_annotations_of_a_size_that_no_image_has_are_one_line(tmp_path, sides):
    root = write_coco(tmp_path / "coco", train=4, val=1)
    change(root, lambda content: content["images"][2].update(width=sides[0], height=sides[1]))
    with pytest.raises(UserError, match=f"no image has {sides[0]} x {sides[1]} pixels"):
        open_pictures(root, seed=0)


def test_what_is_wrong_with_a_voc_folder_is_one_line(tmp_path):
    root = write_voc(tmp_path, "VOC2007", {"trainval": range(2), "test": range(20, 22)})
    annotation = root / "VOC2007/Annotations/000001.xml"
    text = annotation.read_text()
    for broken, words in (
        (text.replace("<name>cat", "<name>cta").replace("<name>aeroplane", "<name>aeroplain"), "VOC has no class"),
        (text.replace("xmax", "xmaximum"), "bndbox/xmax is missing"),
        (text[:-5], "not an annotation"),
        ('<?xml version="1.0" encoding="bogus"?>' + text, "not an annotation of VOC .*bogus"),
        (re.sub(r"<width>.*?</width>", f"<width>{'9' * 400}</width>", text), "no image has"),
        (re.sub(r"<width>.*?</width>", f"<width>{'9' * 5000}</width>", text), "not an annotation"),
        (re.sub(r"<xmin>.*?</xmin>", "<xmin>nan</xmin>", text), "bndbox is nan"),
        (re.sub(r"<xmax>.*?</xmax>", "<xmax>1e400</xmax>", text), "bndbox is .* inf"),
        (None, "no such file"),
    ):
        annotation.write_text(broken) if broken else annotation.unlink()
        with pytest.raises(UserError, match=words):
            open_pictures(root, seed=0)


def test_an_image_of_another_size_than_its_annotations_say(splits):
    picture = splits.train.pictures[0]._replace(width=33)
    with pytest.raises(UserError, match="its annotations say 33 x"):
        Maker(3, 128, masks=False)(Task(picture, 64, False))


# --- what the network is fed


@pytest.mark.parametrize(
    ("image", "shorter", "longest", "expected"),
    [((480, 640), 800, 1333, (800, 1067)), ((400, 1000), 800, 1333, (533, 1333)), ((1000, 500), 250, 1333, (500, 250))],
)
def test_the_shorter_side_unless_the_longer_is_too_long(image, shorter, longest, expected):
    assert resized_shape(*image, shorter, longest) == expected


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_and_masks_move_with_the_image(splits, flip):
    for picture in splits.train.pictures:
        sample = Maker(3, 300, masks=True)(Task(picture, 128, flip))
        assert sample.image.shape[-2:] == resized_shape(picture.height, picture.width, 128, 300)
        factor = 128 / min(picture.height, picture.width)
        for box, mask, label, instance in zip(
            *(sample.target[k] for k in ("boxes", "masks", "labels")), picture.trainable()
        ):
            left, top, right, bottom = (factor * side for side in instance.box)
            width = sample.image.shape[-1]
            expected = (width - right, top, width - left, bottom) if flip else (left, top, right, bottom)
            assert torch.allclose(box, torch.tensor(expected), atol=1e-4)
            rows, columns = mask.any(1).nonzero().ravel(), mask.any(0).nonzero().ravel()
            there = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            assert (there - box).abs().max() <= 1  # rounded to pixels
            inner = box.round().int() + torch.tensor([3, 3, -3, -3])
            colour = sample.image[:, inner[1] : inner[3], inner[0] : inner[2]].float().mean((1, 2))
            if len(picture.instances) == 1:  # several may cover each other
                assert torch.allclose(colour, torch.tensor(COLOURS[[3, 7, 90][label - 1]]).float(), atol=1)


def test_mirroring_twice_changes_nothing(splits):
    sample = Maker(3, 128, masks=True)(Task(splits.train.pictures[2], 64, False))
    image, target = mirrored(*mirrored(sample.image, sample.target))
    assert torch.equal(image, sample.image)
    assert torch.allclose(target["boxes"], sample.target["boxes"], atol=1e-5)
    assert torch.equal(target["masks"], sample.target["masks"])


def test_every_image_once_before_any_again_whatever_the_number_of_processes(splits, monkeypatch):
    settings = Settings(**SMALL | {"batch_size": 6})
    maker = Maker(3, 128, masks=False)
    feed = TrainingSamples(splits.train.pictures, maker, settings)
    order = [task for step in range(4) for task in feed.tasks(step)]
    for start in (0, 8, 16):  # epochs of 8 images, steps of 6
        assert {task.picture.file for task in order[start : start + 8]} == {p.file for p in splits.train.pictures}
    assert [task.picture for task in order[:8]] != [task.picture for task in order[8:16]]
    assert {task.shorter for task in order} == {64, 72} and {task.mirrored for task in order} == {False, True}
    assert TrainingSamples(splits.train.pictures, maker, settings).tasks(3) == order[18:]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares += TrainingSamples(splits.train.pictures, maker, settings).tasks(3)
    assert shares == order[18:]
    with pytest.raises(UserError, match="multiple of the 2 processes"):
        TrainingSamples(splits.train.pictures, maker, Settings(**SMALL | {"batch_size": 5}))


def test_the_papers_schedules():
    voc, coco_ = Settings(), SegmentationConfig()
    assert (voc.iterations, voc.batch_size, voc.sizes[0], voc.sizes[-1], len(voc.sizes)) == (24_000, 16, 480, 800, 11)
    assert (coco_.iterations, coco_.sizes) == (90_000, (640, 672, 704, 736, 768, 800))
    for settings, peak, first, second in ((voc, 0.15, 18_000, 22_000), (coco_, 0.08, 60_000, 80_000)):
        assert settings.lr_at(0) == pytest.approx(peak * 0.001)
        assert settings.lr_at(500) == pytest.approx(peak * (0.001 + 1) / 2)
        assert settings.lr_at(1_000) == settings.lr_at(first - 1) == peak
        assert settings.lr_at(first) == settings.lr_at(second - 1) == pytest.approx(peak / 10)
        assert settings.lr_at(second) == settings.lr_at(settings.iterations - 1) == pytest.approx(peak / 100)


def test_c4_has_the_schedules_of_moco():
    """facebookresearch/moco, detection/configs: pascal_voc_R_50_C4_24k_moco.yaml, coco_R_50_C4_2x_moco.yaml."""
    voc, coco_ = Settings(neck="c4"), SegmentationConfig(neck="c4")
    assert (voc.iterations, voc.warmup_iterations) == (24_000, 100)
    assert (coco_.iterations, coco_.warmup_iterations) == (180_000, 1_000)
    for settings, first, second in ((voc, 18_000, 22_000), (coco_, 120_000, 160_000)):
        assert settings.neck_norm  # the extra norm after the fourth stage
        assert (settings.batch_size, settings.weight_decay, settings.momentum) == (16, 1e-4, 0.9)
        assert (settings.proposals, settings.regions, settings.precise_norm) == (1_000, 512, 200)
        assert settings.lr_at(0) == pytest.approx(0.02 * 0.001)
        assert settings.lr_at(settings.warmup_iterations) == settings.lr_at(first - 1) == 0.02
        assert settings.lr_at(first) == settings.lr_at(second - 1) == pytest.approx(0.002)
        assert settings.lr_at(second) == settings.lr_at(settings.iterations - 1) == pytest.approx(0.0002)
    assert Settings(neck="c4", sizes=voc.sizes) == voc
    assert SegmentationConfig(neck="c4", iterations=90_000, lr=0.03).model_dump() == coco_.model_dump() | {
        "iterations": 90_000,
        "lr": 0.03,
    }


def test_fewer_images_get_fewer_iterations_unless_they_are_given():
    """The geometric mean of equal iterations and equal epochs; published numbers at the size of the published data."""
    for kind, images in ((DetectionConfig, 16_551), (DetectionConfig, 117_266), (SegmentationConfig, 117_266)):
        for neck in ("fpn", "c4"):
            assert kind(neck=neck).for_images(images) == kind(neck=neck)
    for settings, images in (
        (DetectionConfig(), 286),
        (DetectionConfig(neck="c4"), 5_000),
        (SegmentationConfig(), 1_000),
        (SegmentationConfig(neck="c4"), 40_000),
    ):
        few = settings.for_images(images)
        share = math.sqrt(images / settings.published_images)
        assert few.iterations == round(share * settings.iterations)
        assert few.warmup_iterations == round(share * settings.warmup_iterations)
        changed = {"iterations": few.iterations, "warmup_iterations": few.warmup_iterations}
        assert few.model_dump() == settings.model_dump() | changed
    assert DetectionConfig(iterations=24_000).for_images(286).iterations == 24_000
    assert DetectionConfig(iterations=2_000, warmup_iterations=10).for_images(286).warmup_iterations == 10
    assert DetectionConfig(warmup_iterations=10).for_images(286).warmup_iterations == 10
    with pytest.raises(UserError, match=r"^286 images: warmup_iterations 5000 must be below iterations 3155"):
        DetectionConfig(warmup_iterations=5_000).for_images(286)


@pytest.mark.parametrize("rule, iterations", [("voc2007", 24_000), ("voc", 24_000), ("coco", 590)])
def test_voc_keeps_its_schedule_whichever_years_there_are(rule, iterations):
    few = Pictures("few", [Picture(Path("a.jpg"), 8, 8, ())] * 10, ("cat",), rule)
    assert scheduled(DetectionConfig(), few).iterations == iterations
    assert scheduled(DetectionConfig(), replace(few, classes=("RBC", "cat"))).iterations == 590


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iterations": 100}, "warmup_iterations 1000 must be below iterations 100"),
        ({"iterations": 100, "neck": "c4"}, "warmup_iterations 100 must be below iterations 100"),
        ({"decay_at": (1.5,)}, "fractions of the iterations"),
        ({"test_size": 1400}, "longest 1333 is below"),
        ({"nek": "c4"}, "did you mean 'neck'"),
    ],
)
def test_settings_that_make_no_sense(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path, "detection", data="nowhere", overrides=changes)


# --- scores


def picture_of(*instances):
    return Picture("a.png", 100, 100, tuple(instances))


def found_of(*rows, masks=None):
    """Rows of (label, score, box)."""
    boxes = np.array([box for *_, box in rows], dtype=np.float64).reshape(-1, 4)
    return Found(boxes, np.array([s for _, s, _ in rows]), np.array([k for k, *_ in rows], dtype=np.int64), masks)


def voc_class_ap(pictures, found, label, threshold, eleven_points):
    return voc_ap(voc_matches(pictures, found, label), threshold, eleven_points)


A, B, FAR = (10.0, 10.0, 30.0, 30.0), (50.0, 50.0, 80.0, 80.0), (0.0, 90.0, 5.0, 95.0)


def test_voc_average_precision_worked_by_hand():
    pictures = [picture_of(Instance(1, A), Instance(1, B)), picture_of(Instance(1, A))]
    found = [found_of((1, 0.9, A), (1, 0.8, FAR), (1, 0.7, B)), found_of()]
    # Right, wrong, right of 3 objects: recall 1/3, 1/3, 2/3 and precision 1, 1/2, 2/3. Recalls 0 to .3 are reached with
    # precision 1, .4 to .6 with 2/3, the other four never.
    assert voc_class_ap(pictures, found, 1, 0.5, eleven_points=True) == pytest.approx((4 * 1 + 3 * 2 / 3) / 11)
    assert voc_class_ap(pictures, found, 1, 0.5, eleven_points=False) == pytest.approx(1 / 3 + 1 / 3 * 2 / 3)
    assert voc_matches(pictures, found, 2) == (0, [])


def test_voc_a_second_detection_of_an_object_is_wrong():
    pictures, found = [picture_of(Instance(1, A), Instance(1, B))], [found_of((1, 0.9, A), (1, 0.8, A), (1, 0.7, B))]
    # Recall 1/2, 1/2, 1 and precision 1, 1/2, 2/3.
    assert voc_class_ap(pictures, found, 1, 0.5, eleven_points=True) == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)


def test_voc_difficult_objects_are_neither_found_nor_missed():
    pictures = [picture_of(Instance(1, A), Instance(1, B, difficult=True))]
    with_it = [found_of((1, 0.9, B), (1, 0.8, B), (1, 0.7, A))]
    assert voc_class_ap(pictures, with_it, 1, 0.5, eleven_points=True) == pytest.approx(1)
    assert voc_class_ap(pictures, [found_of((1, 0.7, A))], 1, 0.5, eleven_points=True) == pytest.approx(1)


def test_voc_overlap_counts_whole_pixels_and_must_exceed_the_threshold():
    # Pixels 1-10 against 6-15 of ten rows: 50 of 150; 1-10 against 1-5: exactly half, which is not enough.
    assert inclusive_overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    pictures = [picture_of(Instance(1, (0.0, 0.0, 10.0, 10.0)))]
    assert voc_class_ap(pictures, [found_of((1, 0.9, (0, 0, 5, 10)))], 1, 0.5, eleven_points=True) == 0
    assert voc_class_ap(pictures, [found_of((1, 0.9, (0, 0, 6, 10)))], 1, 0.5, eleven_points=True) == pytest.approx(1)


def test_voc_scores_are_means_over_thresholds_and_classes():
    pictures = Pictures("x", [picture_of(Instance(1, A), Instance(3, B))], ("a", "b", "c"), "voc2007")
    # The first box overlaps by (20 * 17) / (20 * 20) = .85: right at .50 to .80 (> threshold), wrong at .85 to .95.
    found = [found_of((1, 0.9, (10, 10, 30, 27)), (3, 0.9, B))]
    numbers = score(pictures, found, masks=False)
    assert numbers == pytest.approx({"box_ap": 100 * (7 * 1 + 3 * 0.5) / 10, "box_ap50": 100, "box_ap75": 100})


def test_area_under_a_curve_that_zigzags():
    recall, precision = np.array([0.25, 0.25, 0.5, 0.75]), np.array([1.0, 0.5, 2 / 3, 0.75])
    assert average_precision(recall, precision, eleven_points=False) == pytest.approx(0.25 * 1 + 0.5 * 0.75)


def shaken(pictures, seed):
    """Objects of pictures moved a little, some left out, some made up: detections with every kind of mistake."""
    random = np.random.default_rng(seed)
    found = []
    for picture in pictures:
        rows, codes = [], []
        for instance in [*picture.instances, *picture.instances]:
            if random.random() < 0.3:
                continue
            box = np.clip(np.array(instance.box) + random.normal(0, 2.5, 4), 0, [picture.width, picture.height] * 2)
            box = box.round()
            label = instance.label if random.random() < 0.8 else int(random.integers(1, 4))
            rows.append((label, float(random.random()), box))
            filled = np.zeros((picture.height, picture.width), dtype=np.uint8)
            filled[int(box[1]) : int(box[3]), int(box[0]) : int(box[2])] = 1
            codes.append(coco_mask.encode(np.asfortranarray(filled)))
        found.append(found_of(*rows, masks=codes))
    return found


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_coco_scores_equal_pycocotools_on_the_original_file(tmp_path, capsys, kind, split):
    root = write_coco(tmp_path / "coco", train=16, val=6)
    pictures = getattr(open_pictures(root, seed=0), "train" if split == "train" else "test")
    found = shaken(pictures.pictures, seed=1)
    truth = COCO(str(root / f"annotations/instances_{split}2017.json"))
    by_name = {row["file_name"]: row["id"] for row in truth.dataset["images"]}
    rows = []
    for picture, one in zip(pictures.pictures, found, strict=True):
        for box, value, label, code in zip(one.boxes, one.scores, one.labels, one.masks):
            row = {"image_id": by_name[picture.file.name], "category_id": [3, 7, 90][label - 1], "score": value}
            where = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            rows.append(row | ({"bbox": where} if kind == "bbox" else {"segmentation": code}))
    oracle = COCOeval(truth, truth.loadRes(rows), kind)
    oracle.evaluate(), oracle.accumulate(), oracle.summarize()
    name = {"bbox": "box", "segm": "mask"}[kind]
    expected = dict(zip((f"{name}_ap", f"{name}_ap50", f"{name}_ap75"), 100 * oracle.stats[:3]))
    capsys.readouterr()
    assert coco_scores(pictures.pictures, found, 3, kind) == pytest.approx(expected, abs=1e-9)
    assert 5 < expected[f"{name}_ap"] < 95  # neither trivial nor hopeless
    assert capsys.readouterr().out == ""


def test_an_object_without_outline_is_neither_right_nor_wrong_for_masks():
    square = [[10, 10, 30, 10, 30, 30, 10, 30]]
    pictures = Pictures("x", [picture_of(Instance(1, A, square, 400), Instance(1, B, None, 900))], ("a",), "coco")
    codes = []
    for x0, y0, x1, y1 in (B, A):
        filled = np.zeros((100, 100), dtype=np.uint8)
        filled[int(y0) : int(y1), int(x0) : int(x1)] = 1
        codes.append(coco_mask.encode(np.asfortranarray(filled)))
    found = [found_of((1, 0.9, B), (1, 0.5, A), masks=codes)]
    assert score(pictures, found, masks=True) == pytest.approx(
        dict.fromkeys(("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75"), 100)
    )
    assert set(score(pictures, [found_of(masks=[])], masks=True).values()) == {0.0}


# --- the network


def batch_of(boxes, labels, side=64):
    """A batch of black images with objects."""
    images = torch.zeros(len(boxes), 3, side, side, dtype=torch.uint8)
    sizes = torch.tensor([[side, side]]).repeat(len(boxes), 1)
    return Batch(images, sizes, boxes, labels, torch.full_like(labels, -1), torch.zeros(0, side, side // 8).byte())


def ramps(strides, side):
    """Maps whose two channels are, at every pixel's centre, its x and y in the image."""
    features = {}
    for level, stride in enumerate(strides):
        along = (torch.arange(side // stride, dtype=torch.float64) + 0.5) * stride
        features[str(level)] = torch.stack(torch.meshgrid(along, along, indexing="xy"))[None].repeat(2, 1, 1, 1)
    return features


@pytest.mark.parametrize("strides", [(4, 8, 16, 32), (1, 2, 4, 8), (16,)])
def test_pooling_gives_the_centres_of_cells(strides):
    """RoIAlign of a function that is linear in x and y is exact: the value at the middle of every cell."""
    pool = AlignedPool(7, strides)
    boxes = [
        torch.tensor([[100.0, 120.5, 130.0, 200.25], [64.0, 64.0, 400.0, 420.0]], dtype=torch.float64),
        torch.tensor([[90.0, 90.0, 310.0, 300.0]], dtype=torch.float64),
    ]
    pooled = pool(ramps(strides, 512), numbered(boxes))
    assert pooled.shape == (3, 2, 7, 7)
    for maps, (x0, y0, x1, y1) in zip(pooled, torch.cat(boxes).tolist()):
        middle = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
        assert torch.allclose(maps[0], (x0 + (x1 - x0) * middle)[None, :].expand(7, 7))
        assert torch.allclose(maps[1], (y0 + (y1 - y0) * middle)[:, None].expand(7, 7))


def test_boxes_go_to_the_level_of_their_size():
    sides = torch.tensor([10.0, 111.0, 112.0, 223.0, 224.0, 447.0, 448.0, 2000.0])
    boxes = torch.stack([0 * sides, 0 * sides, sides, sides], dim=1)
    assert AlignedPool(7, (4, 8, 16, 32)).level_of(boxes).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert AlignedPool(7, (1, 2, 4, 8)).level_of(boxes / 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_masks_are_cut_out_at_the_proposals():
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[1, 10:30, 10:30] = 1
    boxes = torch.tensor([[10.0, 10.0, 30.0, 30.0], [20.0, 10.0, 40.0, 30.0], [10.0, 10.0, 30.0, 30.0]])
    cut = cut_out(masks, boxes, torch.tensor([1, 1, 0]), 10)
    assert cut[0].eq(1).all() and cut[2].eq(0).all()
    assert cut[1][:, :5].eq(1).all() and cut[1][:, 5:].eq(0).all()


def test_the_loss_of_masks_is_a_mean_over_pixels_and_zero_without_any():
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[1, 10:30, 10:30] = 1
    boxes = torch.tensor([[10.0, 10.0, 30.0, 30.0]]).repeat(2, 1)
    logits = torch.stack([torch.full((6, 6), 2.0), torch.full((6, 6), 3.0)]).requires_grad_()
    loss = mask_loss(logits, boxes, torch.tensor([1, 0]), masks)  # all of the first is object, nothing of the second
    assert loss.item() == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(3))) / 2)
    none = mask_loss(logits[:0], boxes[:0], torch.zeros(0, dtype=torch.int64), masks)
    none.backward()
    assert none.item() == 0 and logits.grad.eq(0).all()


def test_pasting_sets_the_pixels_whose_centres_lie_in_the_box():
    full = pasted(torch.ones(28, 28), torch.tensor([3.4, 5.0, 9.4, 11.6]), 20, 15)
    assert full.shape == (20, 15)
    rows, columns = np.flatnonzero(full.any(1)), np.flatnonzero(full.any(0))
    assert (columns[0], columns[-1], rows[0], rows[-1]) == (3, 8, 5, 11) and full[5:12, 3:9].all()
    half = torch.zeros(28, 28)
    half[:, :14] = 1
    assert pasted(half, torch.tensor([0.0, 0.0, 10.0, 10.0]), 10, 10)[:, :5].all()
    assert not pasted(half, torch.tensor([0.0, 0.0, 10.0, 10.0]), 10, 10)[:, 5:].any()
    assert not pasted(torch.ones(28, 28), torch.tensor([-9.0, -9.0, -1.0, -1.0]), 10, 10).any()


@pytest.mark.parametrize(("stem", "strides"), [("standard", (4, 8, 16, 32)), ("small", (1, 2, 4, 8))])
def test_strides_are_those_of_the_stem_and_anchors_follow_them(stem, strides):
    backbone = small_backbone(stem)
    pyramid = build_detector(backbone, 3, Settings(**SMALL | {"anchor_scale": 8.0}), masks=True)
    assert pyramid.roi_heads.box_roi_pool.strides == pyramid.roi_heads.mask_roi_pool.strides == strides
    sides = [size for level in pyramid.rpn.anchor_generator.sizes for size in level]
    assert sides == [8 * stride for stride in (*strides, 2 * strides[-1])]
    c4 = build_detector(backbone, 3, Settings(**SMALL | {"anchor_scale": 8.0, "neck": "c4"}), masks=True)
    assert c4.roi_heads.box_roi_pool.strides == (strides[2],)
    assert c4.rpn.anchor_generator.num_anchors_per_location() == [15]
    if stem == "standard":
        assert sides == [32, 64, 128, 256, 512] == list(c4.rpn.anchor_generator.sizes[0])
    for detector in (pyramid, c4):
        assert detector.mean.ravel().tolist() == pytest.approx([0.4] * 3)
        assert detector.std.ravel().tolist() == pytest.approx([0.2] * 3)
        assert all(parameter.requires_grad for parameter in detector.parameters())
        held = {id(p) for p in backbone.parameters()}
        assert not any(id(p) in held for p in detector.parameters())  # a copy: the backbone stays as it was


def test_only_resnets_are_turned_into_detectors():
    with pytest.raises(UserError, match="needs a ResNet"):
        build_detector(small_backbone(name="torchvision/mobilenet_v3_small"), 3, Settings(**SMALL), masks=False)


@pytest.mark.parametrize("neck", ["fpn", "c4"])
@pytest.mark.parametrize("masks", [False, True])
def test_every_layer_is_trained_and_the_backbones_weights_are_in_it(splits, neck, masks, tmp_path):
    backbone = small_backbone()
    settings = Settings(**SMALL | {"neck": neck})
    detector = make_detector(Job("x", splits, settings, masks, tmp_path, torch.device("cpu")), backbone)
    values = list(detector.parameters())
    for name, parameter in backbone.named_parameters():
        assert any(parameter.shape == value.shape and torch.equal(parameter, value) for value in values), name
    feed = TrainingSamples(splits.train.pictures, Maker(3, 128, masks), settings)
    torch.manual_seed(0)
    losses = detector.train()(next(feed.iterate(0, 1, torch.device("cpu"))))
    assert set(losses) == {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg"} | (
        {"loss_mask"} if masks else set()
    )
    assert losses["loss_classifier"].item() == pytest.approx(math.log(4), abs=0.1)  # scores begin nearly equal
    assert losses["loss_objectness"].item() == pytest.approx(math.log(2), abs=0.1)
    sum(losses.values()).backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    decayed, plain = make_optimizer(detector, settings).param_groups
    norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in detector.modules())
    assert len(plain["params"]) == 2 * norms and plain["weight_decay"] == 0
    assert len(decayed["params"]) == len(list(detector.parameters())) - 2 * norms


def test_losses_of_proposals_are_sums_over_the_regions_to_be_sampled():
    rpn = build_detector(small_backbone(), 3, Settings(**SMALL), masks=False).rpn
    anchors = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40], [0, 0, 10, 22], [50, 0, 60, 10]])
    boxes = torch.tensor([[[0.0, 0, 10, 10]], [[20, 20, 40, 45]]])
    # The first image: object, background, neither (10/22 of overlap), background. The second: one object by .8 overlap.
    losses = rpn.losses(torch.zeros(2, 4), torch.zeros(2, 4, 4), anchors, batch_of(boxes, torch.ones(2, 1).long()))
    assert losses["loss_objectness"].item() == pytest.approx((3 + 4) * math.log(2) / (256 * 2))
    shift = 2.5 / 20 + math.log(25 / 20)  # the centre lies 2.5 lower, and the object is 25 high
    assert losses["loss_rpn_box_reg"].item() == pytest.approx(shift / (256 * 2))


# --- training


def without_times(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in lines]


@pytest.fixture(scope="module")
def learnt(coco, tmp_path_factory):
    """A backbone file judged by segmentation, as a user does it."""
    file = tmp_path_factory.mktemp("backbone") / "narrow.safetensors"
    save_backbone(small_backbone(), file)
    changes = {"iterations": 60, "warmup_iterations": 10, "sizes": (64,), "flip": 0.0, "width": 32, "precise_norm": 4}
    quick = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.05}
    overrides = SMALL | changes | quick | {"score_every": 30, "score_train_images": 8}
    return evaluate(file, "segmentation", data=coco, overrides=overrides), file.with_suffix("") / "segmentation"


def test_a_detector_learns_coloured_rectangles(learnt):
    result, home = learnt
    assert result.protocol == "segmentation" and result.settings["iterations"] == 60
    assert (result.data["train"], result.data["test"], result.data["classes"]) == (8, 5, 3)
    (folder,) = home.iterdir()
    for name in ("trained", "untrained"):
        numbers, lines = result.numbers[name], without_times(folder / name)
        assert numbers["train_box_ap50"] > 30 and numbers["train_mask_ap50"] > 30
        scored = [line for line in lines if "box_ap" in line]
        assert [line["step"] for line in scored] == [0, 30, 60]
        assert scored[0]["train_box_ap50"] < 5
        losses = [line["loss"] for line in lines if "loss" in line]
        assert len(losses) == 60 and np.mean(losses[-5:]) < 0.5 * losses[0]
        for sheet in ("predictions.png", "train_predictions.png"):
            with Image.open(folder / name / sheet) as image:
                assert image.width > 400 and np.asarray(image).std() > 10


def test_the_same_command_finds_its_work_done(learnt, coco, monkeypatch):
    result, home = learnt
    monkeypatch.setattr(training, "make_step", None)  # not one more step
    again = evaluate(home.parent.with_suffix(".safetensors"), "segmentation", data=coco, overrides=result.settings)
    assert again.numbers == result.numbers and len(list(home.iterdir())) == 1


class Crash(Exception):
    pass


def test_a_resumed_training_equals_an_uninterrupted_one(splits, tmp_path, monkeypatch):
    settings = Settings(**SMALL | {"checkpoint_every": 3, "score_every": 4})
    whole = Job("whole", splits, settings, True, tmp_path / "whole", torch.device("cpu"))
    numbers = train(whole, small_backbone())
    broken = replace(whole, name="broken", folder=tmp_path / "broken")
    step, calls = training.make_step, []

    def crashing(*arguments):
        calls.append(1)
        if len(calls) == 6:  # after a checkpoint at 3, a scoring at 4 and two more lines of metrics
            raise Crash
        return step(*arguments)

    monkeypatch.setattr(training, "make_step", crashing)
    with pytest.raises(Crash):
        train(broken, small_backbone())
    torch.manual_seed(12345)  # a new process has other random states
    assert train(broken, small_backbone()) == numbers
    assert len(calls) == 6 + 5
    a, b = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "broken"))
    assert a["step"] == b["step"] == 8
    for name, value in a["method"].items():
        assert torch.equal(value, b["method"][name]), name
    for number, state in a["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], b["optimizer"]["state"][number]["momentum_buffer"])
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "broken")


def test_a_loss_that_is_not_a_number_stops_with_one_line(splits, tmp_path):
    settings = Settings(**SMALL | {"lr": 1e9, "warmup_iterations": 0})
    with pytest.raises(UserError, match="lower lr"):
        train(Job("x", splits, settings, False, tmp_path, torch.device("cpu")), small_backbone())


def test_voc_end_to_end(tmp_path):
    write_voc(tmp_path / "VOCdevkit", "VOC2007", {"trainval": range(4), "test": range(20, 22)})
    save_backbone(small_backbone(), tmp_path / "b.safetensors")
    overrides = SMALL | {"iterations": 3, "neck": "c4"}
    result = evaluate(tmp_path / "b.safetensors", "detection", data=tmp_path / "VOCdevkit", overrides=overrides)
    assert result.data["rule"] == "voc2007" and set(result.numbers["trained"]) == {"box_ap", "box_ap50", "box_ap75"}
    with pytest.raises(UserError, match="segmentation needs outlines"):
        evaluate(tmp_path / "b.safetensors", "segmentation", data=tmp_path / "VOCdevkit", overrides=overrides)
    with pytest.raises(UserError, match="say which images with data="):
        evaluate(tmp_path / "b.safetensors", "detection", overrides=overrides)


def test_the_sheet_shows_truth_above_and_what_was_found_below(splits, tmp_path):
    pictures = [p for p in splits.train.pictures if len(p.instances) == 1][:2]
    sure = [found_of((p.instances[0].label, 0.9, p.instances[0].box), (1, 0.1, FAR)) for p in pictures]
    assert [mark.text for mark in found_marks(sure[0], splits.train.classes)] == [
        f"{splits.train.classes[pictures[0].instances[0].label - 1]} 0.90"
    ]
    sheets = []
    for name, found in (("same", sure), ("none", [found_of(), found_of()])):
        save_sheet(tmp_path / f"{name}.png", pictures, found, splits.train.classes)
        sheets.append(np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int))
    half = sheets[0].shape[0] // 2
    assert (sheets[0][: half - 6] == sheets[1][: half - 6]).all()  # the truth is the same
    assert (sheets[0][half:] != sheets[1][half:]).any()


def _in_two_processes(rank, port, root, folder):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        splits = open_pictures(root, seed=0)
        settings = Settings(**SMALL | {"iterations": 3})
        job = Job("two", splits, settings, True, folder / "job", torch.device("cpu"))
        numbers = train(job, small_backbone())
        detector = make_detector(job, small_backbone())
        detector.load_state_dict(torch.load(folder / "job/last.pt", weights_only=True)["method"])
        found = find_objects(detector, splits.train.pictures[:5], 3, settings, job.device, torch.float32)
        torch.save([numbers, [one.boxes.tolist() for one in found]], folder / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_train_one_detector_and_share_the_images(coco, splits, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(_in_two_processes, args=(port, coco, tmp_path), nprocs=2)
    (numbers, found), (also, too) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert numbers == also and found == too and len(found) == 5
    settings = Settings(**SMALL | {"iterations": 3})
    detector = make_detector(Job("one", splits, settings, True, tmp_path, torch.device("cpu")), small_backbone())
    detector.load_state_dict(torch.load(tmp_path / "job/last.pt", weights_only=True)["method"])
    alone = find_objects(detector, splits.train.pictures[:5], 3, settings, torch.device("cpu"), torch.float32)
    for one, boxes in zip(alone, found, strict=True):
        assert np.allclose(one.boxes, np.array(boxes).reshape(-1, 4), atol=1e-3)
