"""Whole batches instead of one image after the other: the same boxes, targets, proposals and masks as torchvision's own
code makes image by image, and work that other processes do ahead."""

import math
import os
import sys
import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("pycocotools")

from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import box_iou, nms

from test_detection import COLOURS, SMALL, small_backbone, write_coco
from tico_ssl.evaluations._detection import protocol
from tico_ssl.evaluations._detection.boxes import decode, draw, encode, overlaps, survivors, survivors_at_once
from tico_ssl.evaluations._detection.heads import Candidates, cut_out
from tico_ssl.evaluations._detection.network import build_detector
from tico_ssl.evaluations._detection.pictures import Pictures
from tico_ssl.evaluations._detection.protocol import claim
from tico_ssl.evaluations._detection.samples import NO_BOX, Batch, Maker, Sample, Task, collate, unpacked
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.evaluations._detection.splits import open_pictures
from tico_ssl.evaluations._detection.training import _Normalised, make_optimizer
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.pipeline.workers import ahead, arrays_ahead
from tico_ssl.runtime.errors import UserError


def random_boxes(*shape, side=100.0, seed=0):
    """Boxes of all sizes, many of which overlap."""
    random = torch.Generator().manual_seed(seed)
    corner = side * torch.rand(*shape, 2, generator=random)
    size = 1 + side / 3 * torch.rand(*shape, 2, generator=random)
    return torch.cat([corner, (corner + size).clamp(max=side)], dim=-1)


def a_batch(objects, height=96, width=128, seed=0):
    """Images of different sizes in one piece, with so many objects each."""
    sizes = torch.tensor([[height - 8 * n, width - 16 * n] for n in range(len(objects))])
    most = max(objects)
    boxes, labels = torch.tensor(NO_BOX).repeat(len(objects), most, 1), torch.zeros(len(objects), most).long()
    for row, count in enumerate(objects):
        boxes[row, :count] = random_boxes(count, side=float(sizes[row].min()), seed=seed + row)
        labels[row, :count] = 1 + torch.arange(count) % 3
    images = torch.zeros(len(objects), 3, height, width, dtype=torch.uint8)
    return Batch(images, sizes, boxes, labels, torch.full_like(labels, -1), torch.zeros(0, height, width // 8).byte())


# --- boxes


def test_overlaps_codes_and_their_inverse_are_torchvisions():
    first, second = random_boxes(3, 20), random_boxes(3, 30, seed=1)
    shared = overlaps(first, second)
    for row in range(3):
        assert torch.equal(shared[row], box_iou(first[row], second[row]))
    boxes, truth = random_boxes(40), random_boxes(40, seed=2)
    for weights in ((1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)):
        assert torch.equal(encode(truth, boxes, weights), BoxCoder(weights).encode_single(truth, boxes))
    codes = 8 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))  # some stretch beyond what is allowed
    assert torch.equal(decode(codes, boxes), BoxCoder((1.0, 1.0, 1.0, 1.0)).decode_single(codes, boxes))
    back = decode(encode(truth.double(), boxes.double(), (1.0, 1.0, 1.0, 1.0)), boxes.double())
    assert torch.allclose(back, truth.double(), atol=1e-9)


@pytest.mark.parametrize("suppress", [survivors, survivors_at_once])
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7])
def test_suppression_of_many_rows_is_torchvisions_of_each(suppress, threshold):
    boxes = random_boxes(6, 300)
    there = torch.rand(6, 300, generator=torch.Generator().manual_seed(3)) < 0.9
    there[5] = False
    kept = suppress(boxes, there, threshold)
    scores = -torch.arange(300.0)
    for row in range(6):
        places = there[row].nonzero().ravel()
        expected = places[nms(boxes[row, places], scores[places], threshold)]
        assert kept[row].nonzero().ravel().tolist() == sorted(expected.tolist())
    assert 0 < kept.sum() < there.sum()


def test_suppression_follows_a_chain_to_its_end():
    """Each box overlaps the next alone: every other one is kept, however long the chain."""
    left = 6.0 * torch.arange(101)
    boxes = torch.stack([left, 0 * left, left + 10, 0 * left + 10], dim=1)[None]  # 4 of 16 pixels are shared
    kept = survivors_at_once(boxes, torch.ones(1, 101, dtype=torch.bool), 0.2)
    assert kept[0].tolist() == [place % 2 == 0 for place in range(101)]


def test_drawing_fills_up_with_background_and_every_place_has_the_same_chance():
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, 0, 0, 0, 0, 0, -1], [1, 1, 1, 1, 1, 0, -1, -1], [-1] * 8])
    times = torch.zeros(3, 8)
    for _ in range(2000):
        drawn = draw(labels, 4, 3)
        assert drawn.is_positive.sum(1).tolist() == [2, 3, 0] and drawn.is_negative.sum(1).tolist() == [2, 1, 0]
        for places, real in ((drawn.positive, drawn.is_positive), (drawn.negative, drawn.is_negative)):
            times += torch.zeros(3, 8).scatter_add(1, places, real.float())
    chance = torch.tensor([[1, 1, 0.4, 0.4, 0.4, 0.4, 0.4, 0], [0.6] * 5 + [1, 0, 0], [0] * 8])
    error = (chance * (1 - chance) / 2000).sqrt()
    assert ((times / 2000 - chance).abs() <= 4.5 * error).all()


# --- the network, against torchvision's code for one image after the other


@pytest.fixture(scope="module")
def detector():
    return build_detector(small_backbone(), 3, Settings(**SMALL | {"proposals": 60}), masks=True)


def test_proposals_are_those_of_torchvision(detector):
    rpn, batch = detector.rpn.train(), a_batch([3, 1, 4])
    random = torch.Generator().manual_seed(0)
    maps = [torch.zeros(3, 16, 96 // s, 128 // s) for s in (4, 8, 16, 32, 64)]
    anchors = rpn.anchor_generator.over(96, 128, maps)
    counts = [3 * m.shape[-2] * m.shape[-1] for m in maps]
    scores = torch.randn(3, sum(counts), generator=random)
    moves = 0.3 * torch.randn(3, sum(counts), 4, generator=random)
    found = rpn.propose(scores, moves, anchors, counts, batch.sizes)
    decoded = rpn.box_coder.decode(moves.view(-1, 4), [anchors] * 3).view(3, -1, 4)
    shapes = [tuple(size) for size in batch.sizes.tolist()]
    expected, _ = RegionProposalNetwork.filter_proposals(rpn, decoded, scores.view(-1, 1), shapes, counts)
    for boxes, there, theirs in zip(*found, expected, strict=True):
        assert len(theirs) == 60 and torch.equal(boxes[there], theirs)


def test_anchors_are_torchvisions_and_whole_pixels_in_bf16_too(detector):
    generator = detector.rpn.anchor_generator
    maps = [torch.zeros(1, 1, 640 // s, 1344 // s) for s in (4, 8, 16, 32, 64)]
    plain = AnchorGenerator(generator.sizes, generator.aspect_ratios)
    (expected,) = plain(ImageList(torch.zeros(1, 3, 640, 1344), [(640, 1344)]), maps)
    anchors = generator.over(640, 1344, [m.bfloat16() for m in maps])
    assert anchors.dtype == torch.float32 and torch.equal(anchors, expected)
    assert torch.equal(anchors, anchors.round())


def test_anchors_get_the_objects_that_torchvision_gives_them(detector, monkeypatch):
    rpn, batch = detector.rpn, a_batch([5, 1, 3])
    anchors = torch.cat([random_boxes(400, seed=9), batch.boxes[0, :2]])
    labels, objects = rpn.assign(anchors, batch)
    targets = [{"boxes": boxes[there > 0]} for boxes, there in zip(batch.boxes, batch.labels)]
    expected, boxes = RegionProposalNetwork.assign_targets_to_anchors(rpn, [anchors] * 3, targets)
    for row in range(3):
        assert labels[row].tolist() == expected[row].tolist()
        positive = labels[row] > 0
        assert torch.equal(batch.boxes[row, objects[row]][positive], boxes[row][positive])
    assert {value for row in labels for value in row.tolist()} == {-1, 0, 1}
    monkeypatch.setattr("tico_ssl.evaluations._detection.heads.PAIRS_AT_ONCE", 1)  # one image at a time
    assert all(map(torch.equal, rpn.assign(anchors, batch), (labels, objects)))
    none = rpn.assign(anchors, batch._replace(labels=torch.zeros_like(batch.labels)))[0]
    assert none.eq(0).all()  # nothing but background


def test_proposals_get_the_objects_that_torchvision_gives_them(detector, monkeypatch):
    heads, batch = detector.roi_heads, a_batch([4, 1, 2])
    monkeypatch.setattr(heads.fg_bg_sampler, "batch_size_per_image", 1000)  # all of them
    monkeypatch.setattr(heads.fg_bg_sampler, "positive_fraction", 1.0)
    random = torch.Generator().manual_seed(0)
    near = batch.boxes[:, :1] + torch.randn(3, 12, 4, generator=random)
    proposals = Candidates(torch.cat([random_boxes(3, 50), near], dim=1), torch.rand(3, 62, generator=random) < 0.8)
    sampled = heads.sample(proposals, batch)
    targets = [
        {"boxes": boxes[labels > 0], "labels": labels[labels > 0], "masks": None}
        for boxes, labels in zip(batch.boxes, batch.labels)
    ]
    lists = [boxes[there] for boxes, there in zip(*proposals)]
    boxes, matched, labels, _ = RoIHeads.select_training_samples(heads, lists, targets)

    def table(boxes, labels, truth):  # of background it does not matter which object is nearest
        return torch.cat([boxes, labels[:, None], truth * (labels > 0)[:, None]], dim=1)

    for row in range(3):
        mine = sampled.regions[:, 0] == row
        theirs = table(boxes[row], labels[row], targets[row]["boxes"][matched[row]])
        ours = table(sampled.regions[mine, 1:], sampled.labels[mine], sampled.truth[mine])
        assert sorted(ours.tolist()) == sorted(theirs.tolist())
    assert 0 < (sampled.labels > 0).sum() < len(sampled.labels)


def test_images_are_normalised_and_nothing_lies_beside_them(detector):
    batch = a_batch([1, 1])
    batch.images[:] = torch.randint(0, 256, batch.images.shape, generator=torch.Generator().manual_seed(0))
    pixels = detector.normalised(batch)
    for image, raw, (height, width) in zip(pixels, batch.images, batch.sizes.tolist()):
        assert torch.equal(image[:, :height, :width], ((raw / 255 - detector.mean) / detector.std)[:, :height, :width])
        assert image[:, height:].eq(0).all() and image[:, :, width:].eq(0).all()


def test_objects_without_outline_are_trained_as_boxes_alone(detector):
    detector.train()
    boxes = torch.tensor([[[4.0, 4, 44, 44], [50, 10, 90, 60]], [[10.0, 10, 60, 60], list(NO_BOX)]])
    batch = a_batch([2, 1])._replace(boxes=boxes, labels=torch.tensor([[1, 2], [3, 0]]))
    outlined = batch._replace(mask_of=torch.tensor([[0, -1], [-1, -1]]), masks=torch.full((1, 96, 16), 255).byte())

    def gradients(batch):
        detector.zero_grad()
        torch.manual_seed(0)
        losses = detector(batch)
        sum(losses.values()).backward()
        predictors = detector.roi_heads.mask_predictor.mask_fcn_logits, detector.roi_heads.box_predictor.layer.bbox_pred
        masks, moves = (predictor.bias.grad for predictor in predictors)
        touched = masks.ne(0), moves.view(4, 4).ne(0).any(1)
        return losses, *(one.nonzero().ravel().tolist() for one in touched)

    losses, masks, moves = gradients(outlined)
    assert masks == [1] and moves == [1, 2, 3]
    # The mean over its own pixels, not over all objects: masks begin as undecided.
    assert losses["loss_mask"].item() == pytest.approx(math.log(2), abs=0.01)
    losses, masks, moves = gradients(batch)
    assert masks == [] and moves == [1, 2, 3] and losses["loss_mask"].item() == 0
    assert all(parameter.grad is not None for parameter in detector.parameters())  # as several processes need


class Counted(TorchDispatchMode):
    """Counts operators, and those that make the CPU wait for a GPU's answer."""

    waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "torchvision::nms")

    def __init__(self):
        super().__init__()
        self.all, self.waiting = 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.all += 1
        self.waiting += operator.name().split(".")[0] in self.waits
        return operator(*args, **(kwargs or {}))


def test_a_step_takes_as_many_operators_whatever_the_number_of_images(detector, monkeypatch):
    monkeypatch.setattr("tico_ssl.evaluations._detection.heads.survivors", survivors_at_once)  # as on a GPU
    monkeypatch.setattr("tico_ssl.evaluations._detection.boxes.STEPS_UNWATCHED", 20)  # enough for both
    detector.train()
    counts = []
    for images in (2, 4):
        batch = a_batch([3] * images)
        batch = batch._replace(mask_of=torch.arange(3 * images).view(-1, 3))
        batch = batch._replace(masks=torch.full((3 * images, 96, 16), 255).byte())
        with Counted() as counted:
            sum(detector(batch).values()).backward()
        counts.append((counted.all, counted.waiting))
    assert counts[0] == counts[1]
    assert counts[0][1] <= 5 + 3  # one for each level of proposals, and for the sampled, the positive, the outlined


def test_calibration_leaves_out_layers_without_statistics(detector):
    batches = [a_batch([2, 1], seed=seed) for seed in range(3)]
    for batch in batches:
        batch.images[:] = torch.randint(0, 256, batch.images.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for whole in (True, False):
        part = _Normalised(detector, torch.device("cpu"), torch.float32)
        assert not part.whole
        part.whole = whole
        calibrate(part, batches)
        found.append({name: value.clone() for name, value in detector.named_buffers() if "running" in name})
    assert found[0] and all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    c4 = build_detector(small_backbone(), 3, Settings(**SMALL | {"neck": "c4"}), masks=False)
    assert _Normalised(c4, torch.device("cpu"), torch.float32).whole  # its box head has some


# --- what goes in


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return open_pictures(write_coco(tmp_path_factory.mktemp("data") / "coco"), seed=0)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shorter", [48, 64, 150])
def test_masks_in_a_batch_lie_on_their_pixels(splits, shorter, flip):
    """An object's pixels have a colour that nothing else has, so image and mask can be held against each other."""
    maker = Maker(3, 200, masks=True)
    pictures = [p for p in splits.train.pictures if len(p.instances) == 1]
    batch = collate([maker(Task(picture, shorter, flip)) for picture in pictures])
    masks = unpacked(batch).bool()
    for row, (height, width) in enumerate(batch.sizes.tolist()):
        mask = masks[batch.mask_of[row, 0], :height, :width]
        colour = torch.tensor(COLOURS[[3, 7, 90][batch.labels[row, 0] - 1]])
        seen = (batch.images[row, :, :height, :width].float() - colour[:, None, None]).abs().amax(0) < 60
        assert (seen & mask).sum() / (seen | mask).sum() > 0.9
        left, top, right, bottom = batch.boxes[row, 0].tolist()
        columns, rows = mask.any(0).nonzero().ravel(), mask.any(1).nonzero().ravel()
        ends = torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert (ends - torch.tensor([left, top, right, bottom])).abs().max() <= 1


def test_a_batch_holds_what_its_samples_do():
    random = torch.Generator().manual_seed(0)
    samples, cuts = [], []
    for height, width, count in ((40, 60, 2), (64, 33, 0), (50, 50, 3)):
        masks = (F.interpolate(torch.rand(1, count or 1, 5, 5, generator=random), (height, width)) > 0.5)[0, :count]
        target = {
            "boxes": torch.cat([random_boxes(count - 1, side=30.0), torch.tensor([[0.0, 0, width, height]])])
            if count
            else torch.zeros(0, 4),
            "labels": 1 + torch.arange(count),
            "masks": masks.byte(),
            "masked": torch.arange(count) != 1,
        }
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=random)
        samples.append(Sample(image, target))
        # Proposals that reach the image's right and lower border, where padding could shine through.
        cuts.append(torch.tensor([[5.0, 5.0, width, height], [width - 9.3, 0.0, width, height - 0.5]]))
    batch = collate(samples)
    assert batch.images.shape == (3, 3, 64, 64) and batch.sizes.tolist() == [[40, 60], [64, 33], [50, 50]]
    assert batch.labels.tolist() == [[1, 2, 0], [0, 0, 0], [1, 2, 3]]
    assert batch.mask_of.tolist() == [[0, -1, -1], [-1, -1, -1], [1, -1, 2]]
    masks = unpacked(batch)
    for row, (sample, boxes) in enumerate(zip(samples, cuts)):
        height, width = sample.image.shape[-2:]
        assert torch.equal(batch.images[row, :, :height, :width], sample.image)
        assert torch.equal(batch.boxes[row, : len(sample.target["labels"])], sample.target["boxes"])
        for number, known in enumerate(sample.target["masked"].tolist()):
            if known:
                mine = batch.mask_of[row, number]
                assert torch.equal(masks[mine, :height, :width], sample.target["masks"][number])
                alone = cut_out(sample.target["masks"], boxes, torch.tensor([number] * 2), 28)
                assert torch.equal(cut_out(masks, boxes, mine.repeat(2), 28), alone)


def test_images_are_spread_over_a_list():
    pictures = Pictures("x", list(range(10)), ("a",), "coco")
    assert pictures.spread(4).pictures == [0, 2, 5, 7]
    assert pictures.spread(10).pictures == pictures.spread(99).pictures == list(range(10))


def test_adamw_is_a_choice_with_the_same_groups(detector):
    plain, other = (
        make_optimizer(detector, Settings(**SMALL | {"optimizer": name, "weight_decay": 0.05}))
        for name in ("sgd", "adamw")
    )
    assert isinstance(plain, torch.optim.SGD) and isinstance(other, torch.optim.AdamW)
    for a, b in zip(plain.param_groups, other.param_groups, strict=True):
        assert a["weight_decay"] == b["weight_decay"] and len(a["params"]) == len(b["params"])


# --- work done ahead, and by several commands


@pytest.mark.parametrize("workers", [1, 3])
def test_work_ahead_comes_in_order_from_other_processes(workers):
    results = list(ahead(lambda number: (number, os.getpid()), range(5, 25), workers))
    assert [number for number, _ in results] == list(range(5, 25))
    if sys.platform.startswith("linux"):
        assert len({process for _, process in results} - {os.getpid()}) == workers
    assert list(ahead(lambda number: number, range(0), workers)) == []


@pytest.mark.parametrize("capacity", [0, 100, 10_000])
def test_arrays_come_whole_whether_or_not_they_fit_the_shared_memory(capacity):
    def work(number):
        return [np.full((number % 7, 30), number, np.float32), np.arange(number), np.full(3, number % 2 == 0)]

    for number, arrays in zip(range(3, 60), arrays_ahead(work, range(3, 60), 3, capacity), strict=True):
        time.sleep(0.002)  # workers go on meanwhile, and must not write over what is in use
        for mine, expected in zip(arrays, work(number), strict=True):
            assert mine.dtype == expected.dtype and np.array_equal(mine, expected)


def test_what_is_wrong_in_another_process_is_one_line():
    def work(number):
        if number == 3:
            raise UserError("image 3 is broken")
        return number

    results = ahead(work, range(6), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError) as error:
        next(results)
    assert str(error.value) == "image 3 is broken"


def test_two_commands_take_different_backbones_and_wait_for_each_other(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.setattr(protocol, "POLL_SECONDS", 0.01)
    names, order = ["trained", "untrained"], []
    with claim(tmp_path, names) as first:
        with claim(tmp_path, names) as second:
            assert (first, second) == ("trained", "untrained")

            def third():
                with claim(tmp_path, names) as name:
                    order.append(name)

            waiting = threading.Thread(target=third)
            waiting.start()
            time.sleep(0.1)
            assert order == []  # both are taken
        waiting.join(5)
        assert order == ["untrained"]
    with claim(tmp_path, names) as again:
        assert again == "trained"  # free as soon as it was left
