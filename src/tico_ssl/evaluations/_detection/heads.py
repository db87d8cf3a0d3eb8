"""The parts of torchvision's R-CNN that differ from detectron2's, made equal to it, batched.

RoIAlign without the half-pixel shift, L1 box losses normalised by the number of sampled regions, mask targets cropped
from pixel masks at the proposals, and a fourth stage shared by boxes and masks (C4), run once on the sampled regions.
Objects without an outline take part in everything but the mask loss.

A step of a small detector is bound by kernel launches, so in training nothing here loops over images, and almost
nothing synchronises with the host.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import roi_align

from tico_ssl.evaluations._detection.boxes import PAIRS_AT_ONCE, at, decode, draw, encode, overlaps, survivors
from tico_ssl.evaluations._detection.samples import Batch, unpacked

Features = dict[str, Tensor]
Losses = dict[str, Tensor]
CANONICAL_SIDE, CANONICAL_STRIDE = 224, 16  # a box of this side is pooled from the level of this stride


class AlignedPool(nn.Module):
    """RoIAlign with adaptive sampling, on the pyramid level that suits a box's size."""

    def __init__(self, side: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.side, self.strides = side, tuple(strides)

    def forward(self, features: Features, regions: Tensor) -> Tensor:
        """Pooled maps (regions, channels, side, side) of regions (image, left, top, right, bottom), in their order."""
        maps = list(features.values())[: len(self.strides)]
        levels, order = self.level_of(regions[:, 1:]).sort()
        steps = torch.arange(len(maps), device=levels.device)
        counts = (levels[:, None] == steps).sum(0).tolist()
        pooled = [
            roi_align(level, part, self.side, 1 / stride, sampling_ratio=0, aligned=True)
            for level, part, stride in zip(maps, regions[order].split(counts), self.strides, strict=True)
        ]
        return torch.cat(pooled).index_select(0, order.argsort())

    def level_of(self, boxes: Tensor) -> Tensor:
        """The level of each box: one level up for every doubling of its side."""
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        level = torch.floor(math.log2(CANONICAL_STRIDE) + torch.log2(area.sqrt() / CANONICAL_SIDE + 1e-8))
        lowest = math.log2(self.strides[0])
        return (level - lowest).clamp(0, len(self.strides) - 1).long()


class Float32(nn.Module):
    """A layer in float32: its outputs are coordinates or scores, which bf16 would round too coarsely."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.float())


class Anchors(AnchorGenerator):
    """Anchors of an image, shared by the whole batch, in float32 whatever the feature maps' type: bf16 would shift them
    by pixels."""

    def over(self, height: int, width: int, maps: Sequence[Tensor]) -> Tensor:
        """Anchors of all levels, concatenated (A, 4)."""
        self.set_cell_anchors(torch.float32, maps[0].device)
        shapes = [(level.shape[-2], level.shape[-1]) for level in maps]
        strides: Any = [[height // h, width // w] for h, w in shapes]
        return torch.cat(self.grid_anchors([list(shape) for shape in shapes], strides))


class Candidates(NamedTuple):
    """Proposals of every image in descending order of score (N, K, 4), and which of them are valid (N, K)."""

    boxes: Tensor
    there: Tensor


class Proposals(RegionProposalNetwork):
    """The region proposal network with an L1 loss; both losses are divided by the number of regions to sample."""

    def forward(self, batch: Batch, features: Features) -> tuple[Candidates, Losses]:
        """Proposals and, when training, losses."""
        maps = list(features.values())
        outputs = self.head(maps)
        anchors = self.anchor_generator.over(*batch.images.shape[-2:], maps)
        counts = [level[0].numel() for level in outputs[0]]
        flat_scores, flat_moves = concat_box_prediction_layers(*outputs)
        scores, moves = flat_scores.view(len(batch.images), -1), flat_moves.view(len(batch.images), -1, 4)
        found = self.propose(scores.detach(), moves.detach(), anchors, counts, batch.sizes)
        return found, self.losses(scores, moves, anchors, batch) if self.training else {}

    def propose(self, scores: Tensor, moves: Tensor, anchors: Tensor, counts: list[int], sizes: Tensor) -> Candidates:
        """The best of every level, after non-maximum suppression within the level, and the best of these overall."""
        limits = sizes.flip(1).repeat(1, 2)[:, None].to(anchors)
        boxes, ranks = [], []
        for near, score, move in zip(anchors.split(counts), scores.split(counts, 1), moves.split(counts, 1)):
            best, places = score.topk(min(self.pre_nms_top_n(), score.shape[1]))
            box = decode(at(move, places), near[places]).clamp(min=0).minimum(limits)
            there = (box[..., 2:] - box[..., :2] >= self.min_size).all(-1)
            boxes.append(box)
            ranks.append(best.sigmoid().where(survivors(box, there, self.nms_thresh), -1.0))
        rank, order = torch.cat(ranks, dim=1).sort(descending=True, stable=True)
        kept = self.post_nms_top_n()
        return Candidates(at(torch.cat(boxes, dim=1), order[:, :kept]), rank[:, :kept] >= 0)

    def losses(self, scores: Tensor, moves: Tensor, anchors: Tensor, batch: Batch) -> Losses:
        """Objectness and box regression: sums over sampled anchors, divided by the number to sample."""
        labels, objects = self.assign(anchors, batch)
        count = self.fg_bg_sampler.batch_size_per_image
        drawn = draw(labels, count, int(count * self.fg_bg_sampler.positive_fraction))
        sampled = torch.cat([at(scores, drawn.positive), at(scores, drawn.negative)], dim=1)
        truth = torch.cat([torch.ones_like(drawn.is_positive), torch.zeros_like(drawn.is_negative)], dim=1)
        weight = torch.cat([drawn.is_positive, drawn.is_negative], dim=1)
        found = F.binary_cross_entropy_with_logits(sampled, truth.float(), weight.float(), reduction="sum")
        true_boxes = at(batch.boxes, at(objects, drawn.positive))
        aims = encode(true_boxes, anchors[drawn.positive], (1.0, 1.0, 1.0, 1.0))
        moved = (at(moves, drawn.positive) - aims).abs().sum(-1).where(drawn.is_positive, 0.0).sum()
        total = count * len(labels)
        return {"loss_objectness": found / total, "loss_rpn_box_reg": moved / total}

    def assign(self, anchors: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """For every anchor of every image (N, A): 1 object, 0 background, -1 ignored, and the best-matching object.

        An anchor is an object if their overlap is high, or if no other anchor overlaps this object more.
        """
        at_once = max(1, PAIRS_AT_ONCE // (batch.labels.shape[1] * len(anchors)))
        parts = zip(batch.boxes.split(at_once), batch.labels.split(at_once), strict=True)
        return tuple(map(torch.cat, zip(*(self._assigned(anchors, *part) for part in parts))))  # type: ignore[return-value]

    def _assigned(self, anchors: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        there = (labels > 0)[..., None]
        shared = overlaps(boxes, anchors[None]).where(there, -1.0)
        best, objects = shared.max(1)
        favourite = ((shared == shared.amax(2, keepdim=True)) & there).any(1)
        matcher = self.proposal_matcher
        background, neither = best < matcher.low_threshold, best < matcher.high_threshold
        return torch.where(favourite, 1, torch.where(background, 0, torch.where(neither, -1, 1))), objects


class Regions(NamedTuple):
    """Sampled regions of all images: (R, 5) with the image index first, their classes (0: background), and the boxes
    and mask indices (-1: none) of their objects."""

    regions: Tensor
    labels: Tensor
    truth: Tensor
    masks: Tensor


class Heads(RoIHeads):
    """Class and box of every proposal and, if the detector has a mask branch, its mask.

    With `shared` the masks are predicted from the box head's maps (C4) instead of from a head of their own.
    """

    shared = False

    def forward(
        self, batch: Batch, features: Features, proposals: Candidates
    ) -> tuple[list[dict[str, Tensor]], Losses]:
        """Losses when training, else the detections in every image."""
        if self.training:
            return [], self.losses(features, self.sample(proposals, batch), batch)
        boxes = [box[there] for box, there in zip(*proposals, strict=True)]
        shapes = [tuple(size) for size in batch.sizes.tolist()]
        maps = self.box_head(self.box_roi_pool(features, numbered(boxes)))
        found = self.postprocess_detections(*self.box_predictor(maps), boxes, shapes)
        results = [dict(zip(("boxes", "scores", "labels"), one)) for one in zip(*found, strict=True)]
        if self.has_mask():
            boxes, labels = [one["boxes"] for one in results], torch.cat([one["labels"] for one in results])
            regions = numbered(boxes)
            maps = self.box_head(self.box_roi_pool(features, regions)) if self.shared else None
            chosen = self._masks_of(features, regions, labels, maps).sigmoid()
            for one, masks in zip(results, chosen.split([len(box) for box in boxes]), strict=True):
                one["masks"] = masks
        return results, {}

    def sample(self, proposals: Candidates, batch: Batch) -> Regions:
        """A sample of objects and background of every image, from the proposals and the true boxes, each matched to the
        object that it overlaps most."""
        real = batch.labels > 0
        boxes = torch.cat([proposals.boxes, batch.boxes], dim=1)
        there = torch.cat([proposals.there, real], dim=1)
        best, objects = overlaps(batch.boxes, boxes).where(real[..., None], -1.0).max(1)
        labels = at(batch.labels, objects).where(best >= self.proposal_matcher.high_threshold, 0)
        count = self.fg_bg_sampler.batch_size_per_image
        drawn = draw(labels.where(there, -1), count, int(count * self.fg_bg_sampler.positive_fraction))
        places = torch.cat([drawn.positive, drawn.negative], dim=1)
        image, number = torch.cat([drawn.is_positive, drawn.is_negative], dim=1).nonzero().unbind(1)
        place = places[image, number]
        nearest = objects[image, place]
        regions = torch.cat([image[:, None].to(boxes), boxes[image, place]], dim=1)
        return Regions(regions, labels[image, place], batch.boxes[image, nearest], batch.mask_of[image, nearest])

    def losses(self, features: Features, sampled: Regions, batch: Batch) -> Losses:
        """Losses of classes, boxes and, if there is a mask branch, masks."""
        regions, labels, truth, mask_of = sampled
        maps = self.box_head(self.box_roi_pool(features, regions))
        logits, moves = self.box_predictor(maps)
        positive = (labels > 0).nonzero().ravel()
        aims = encode(truth[positive], regions[positive, 1:], self.box_coder.weights)
        moves = moves.view(len(labels), -1, 4)[positive, labels[positive]]
        losses = {
            "loss_classifier": F.cross_entropy(logits, labels),
            "loss_box_reg": F.l1_loss(moves, aims, reduction="sum") / len(labels),
        }
        if self.has_mask():
            outlined = ((labels > 0) & (mask_of >= 0)).nonzero().ravel()
            regions, labels, mask_of = regions[outlined], labels[outlined], mask_of[outlined]
            predicted = self._masks_of(features, regions, labels, maps[outlined] if self.shared else None)
            losses["loss_mask"] = mask_loss(predicted, regions[:, 1:], mask_of, unpacked(batch))
        return losses

    def _masks_of(self, features: Features, regions: Tensor, labels: Tensor, maps: Tensor | None) -> Tensor:
        """Mask logits (R, side, side) of regions, each for its class."""
        if maps is None:
            maps = self.mask_head(self.mask_roi_pool(features, regions))
        logits: Tensor = self.mask_predictor(maps)
        return logits[torch.arange(len(labels), device=labels.device), labels].float()


def numbered(boxes: Sequence[Tensor]) -> Tensor:
    """Boxes of several images in one list (R, 5), the image index first."""
    return torch.cat([F.pad(box, (1, 0), value=number) for number, box in enumerate(boxes)])


def mask_loss(logits: Tensor, boxes: Tensor, mask_of: Tensor, masks: Tensor) -> Tensor:
    """Binary cross-entropy of the masks of regions whose objects have an outline, averaged over their pixels.

    Without such regions it is zero but still depends on all parameters, as DistributedDataParallel needs.
    """
    aims = cut_out(masks, boxes, mask_of, logits.shape[-1])
    return F.binary_cross_entropy_with_logits(logits, aims, reduction="sum") / max(1, logits.numel())


def cut_out(masks: Tensor, boxes: Tensor, objects: Tensor, side: int) -> Tensor:
    """Each object's mask cropped to its box, at side x side pixels, 0 or 1."""
    regions = torch.cat([objects[:, None].to(boxes), boxes], dim=1)
    shares: Tensor = roi_align(masks[:, None].to(boxes), regions, side, aligned=True)[:, 0]
    return (shares >= 0.5).to(boxes)
