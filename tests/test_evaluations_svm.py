"""VOC07's SVMs against scikit-learn used directly, and average precision against cases worked by hand."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.svm import LinearSVC

from tico_ssl import evaluate
from tico_ssl.config.sections import BackboneConfig
from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.source import spread_evenly
from tico_ssl.evaluations import svm
from tico_ssl.features.extraction import squashed
from tico_ssl.features.frozen import Features
from tico_ssl.features.scores import average_precision
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.runtime.errors import UserError


@pytest.mark.parametrize(
    ("ranked", "expected"),
    [
        ("+", 1.0),
        ("-+", 1 / 2),
        ("++--", 1.0),
        ("+-+", (1 + 2 / 3) / 2),
        ("-++", 2 / 3),  # precision 1/2 at the first is raised to the 2/3 that comes later
        ("+--+-+", (1 + 1 / 2 + 1 / 2) / 3),
        ("--", math.nan),
    ],
)
def test_average_precision_worked_by_hand(ranked, expected):
    scores = -np.arange(len(ranked), dtype=float)
    found = average_precision(scores, np.array([mark == "+" for mark in ranked]))
    assert found == pytest.approx(expected, nan_ok=True)


def test_equal_scores_are_one_step_in_any_order():
    """Two of four images at one score: precision 1/2 at a recall of 1."""
    for present in ([1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]):
        assert average_precision(np.zeros(4), np.array(present, dtype=bool)) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=25))
def test_average_precision_is_the_area_under_the_falling_curve(images):
    """By its definition: at every recall, the best precision at that recall or a higher one."""
    scores, present = np.array([s for s, _ in images], dtype=float), np.array([p for _, p in images])
    if not present.any():
        return
    points = []
    for threshold in np.unique(scores):
        kept = scores >= threshold
        points.append(((kept & present).sum() / present.sum(), (kept & present).sum() / kept.sum()))
    area, before = 0.0, 0.0
    for recall in sorted({r for r, _ in points}):
        area += (recall - before) * max(p for r, p in points if r >= recall)
        before = recall
    assert average_precision(scores, present) == pytest.approx(area)


def features_of_voc(images=90, classes=3, width=12, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.choice([-1, -1, 0, 1], (images, classes))
    pull = generator.normal(size=(classes, width))
    features = (labels == 1) @ pull + generator.normal(size=(images, width))
    return torch.tensor(features, dtype=torch.float32), torch.tensor(labels)


def test_svms_are_scikit_learns_with_costs_by_cross_validation():
    train, labels = features_of_voc(seed=0)
    test, truths = features_of_voc(60, seed=1)
    config = svm.Config(costs=(0.1, 1.0, 10.0))
    found = svm.svm_precision(Features(train, test, labels, truths), config)
    unit = [
        x.double().numpy() / (np.linalg.norm(x.double().numpy(), axis=1, keepdims=True) + 1e-5) for x in (train, test)
    ]
    precisions = []
    for number in range(3):
        machine = LinearSVC(class_weight={1: 2, -1: 1}, max_iter=2000, tol=1e-4, random_state=0, dual=True)
        search = GridSearchCV(machine, {"C": [0.1, 1.0, 10.0]}, cv=3, scoring="average_precision")
        target = np.where(labels[:, number] == 1, 1, -1)  # what is hard to tell is not there, in training
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            scores = search.fit(unit[0], target).decision_function(unit[1])
        rated = truths[:, number].numpy() != 0  # and does not count in the test
        precisions.append(average_precision(scores[rated], truths[:, number].numpy()[rated] == 1))
    assert found == {"map": pytest.approx(100 * np.mean(precisions), abs=1e-6)}


def test_hard_images_change_nothing_in_the_test():
    train, labels = features_of_voc(seed=0)
    test, truths = features_of_voc(60, seed=1)
    config = svm.Config(costs=(1.0,))
    more = torch.cat([test, 100 * test[:5]]), torch.cat([truths, torch.zeros(5, 3, dtype=torch.int64)])
    first = svm.svm_precision(Features(train, test, labels, truths), config)
    assert svm.svm_precision(Features(train, more[0], labels, more[1]), config) == first


def test_labels_of_0_and_1_alone_are_absent_and_present():
    """The usual coding; a 0 means difficult only beside -1, which may be in one of the splits."""
    train, labels = features_of_voc(seed=0)
    test, truths = features_of_voc(60, seed=1)
    config = svm.Config(costs=(1.0,))
    signs, bits = ([torch.where(y == 1, 1, absent) for y in (labels, truths)] for absent in (-1, 0))
    expected = svm.svm_precision(Features(train, test, *signs), config)
    assert expected["map"] < 99
    assert svm.svm_precision(Features(train, test, *bits), config) == expected
    assert all(
        torch.equal(*pair) for pair in zip(Features(train, test, labels, bits[1]).raw_labels(), (labels, bits[1]))
    )


def test_a_class_that_all_rated_test_images_have_is_left_out():
    """Any order of them has an average precision of 1."""
    train, labels = features_of_voc(90)
    test, truths = features_of_voc(60, seed=1)
    config = svm.Config(costs=(1.0,))
    common = truths.clone()
    common[:, 0] = torch.where(truths[:, 0] == -1, 0, truths[:, 0])
    found = svm.svm_precision(Features(train, test, labels, common), config)
    assert found == svm.svm_precision(Features(train, test, labels[:, 1:], truths[:, 1:]), config)
    with pytest.raises(UserError, match=r"^svm needs a class"):
        svm.svm_precision(Features(train, test, labels[:, :1], common[:, :1]), config)


def test_one_class_an_image_is_one_against_the_rest():
    generator = torch.Generator().manual_seed(0)
    centres = 5 * torch.eye(4, 8)
    labels, truths = torch.arange(80) % 4, torch.arange(20) % 4
    train, test = (centres[y] + 0.3 * torch.randn(len(y), 8, generator=generator) for y in (labels, truths))
    found = svm.svm_precision(Features(train, test, labels, truths), svm.Config(costs=(1.0, 10.0)))
    assert found == {"map": pytest.approx(100), "top1": 100.0}


def test_most_images_are_spread_evenly():
    train, labels = features_of_voc(90)
    config = svm.Config(costs=(1.0,), most_images=45)
    places = spread_evenly(90, 45)
    some = Features(train[places], train, labels[places], labels)
    assert svm.svm_precision(Features(train, train, labels, labels), config) == svm.svm_precision(some, config)


def test_a_class_with_too_few_images_is_left_out_and_none_is_an_error():
    train, labels = features_of_voc(90)
    rare = torch.full((90, 1), -1)
    rare[:2] = 1
    config = svm.Config(costs=(1.0,))
    with_rare = Features(train, train, torch.cat([labels, rare], dim=1), torch.cat([labels, rare], dim=1))
    assert svm.svm_precision(with_rare, config) == svm.svm_precision(Features(train, train, labels, labels), config)
    with pytest.raises(
        UserError, match=r"^svm needs a class that 3 training images and a test image have, and as many do not"
    ):
        svm.svm_precision(Features(train, train, rare, rare), config)


def test_classes_that_are_done_are_not_done_again(tmp_path, monkeypatch):
    train, labels = features_of_voc(90)
    features, config = Features(train, train, labels, labels), svm.Config(costs=(1.0,))
    whole = svm.svm_precision(features, config, kept=tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert len(lines) == 3
    (tmp_path / "part.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])  # cut by a crash
    made = []
    monkeypatch.setattr(svm, "_one_class", lambda *a, real=svm._one_class: made.append(1) or real(*a))
    assert svm.svm_precision(features, config, kept=tmp_path / "part.jsonl") == whole
    assert len(made) == 1


def test_the_whole_image_is_pressed_into_the_square():
    """An object at the edge of a wide image is seen; the centre alone would miss it."""
    backbone = build_backbone(BackboneConfig(name="tico/resnet10-w2"), 16, (0.0,) * 3, (1.0,) * 3)
    image = torch.zeros(3, 32, 96, dtype=torch.uint8)
    image[:, :, :16] = 255
    pressed = squashed(backbone, [image])[0]
    assert pressed.shape == (3, 16, 16)
    assert pressed[:, :, 0].min() > 0.9
    assert pressed[:, :, 8:].abs().max() < 1e-3
    assert backbone.preprocess([image]).abs().max() < 1e-3


def test_voc2007_in_its_own_layout(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2007"
    (root / "JPEGImages").mkdir(parents=True)
    (root / "ImageSets" / "Main").mkdir(parents=True)
    generator = np.random.default_rng(0)
    names = {"trainval": range(24), "test": range(24, 36)}
    for number in range(36):
        noise = generator.integers(0, 256, (24, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / "JPEGImages" / f"{number:06}.jpg")
    for place, kind in enumerate(VOC_CLASSES):
        for split, numbers in names.items():
            marks = [(number + place) % 3 - 1 for number in numbers]
            text = "".join(f"{number:06} {mark:2d}\n" for number, mark in zip(numbers, marks))
            (root / "ImageSets" / "Main" / f"{kind}_{split}.txt").write_text(text)
    save_backbone(build_backbone(BackboneConfig(name="tico/resnet10-w2"), 16), tmp_path / "b.safetensors")
    result = evaluate(tmp_path / "b.safetensors", "svm", data=str(root), overrides={"costs": [1.0]})
    assert result.data["train"] == 24
    assert result.numbers.keys() == {"trained", "untrained"}
    assert all(numbers.keys() == {"map"} and 0 < numbers["map"] <= 100 for numbers in result.numbers.values())
    with pytest.raises(UserError, match=r"^fine-tune needs one class per image; these images have several$"):
        evaluate(tmp_path / "b.safetensors", "fine-tune", data=str(root))
