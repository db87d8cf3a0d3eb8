"""The parts of torchvision's R-CNN that differ from detectron2's, made equal to it.

RoIAlign without the half-pixel shift, L1 losses of boxes normalised by the number of sampled regions, masks cut out of
pixels at the proposals, and a fourth stage that boxes and masks share (C4), run once on the sampled regions. Objects
without an outline take part in everything but the loss of masks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import roi_align

Boxes = list[Tensor]
CANONICAL_SIDE, CANONICAL_STRIDE = 224, 16  # a box of this side is pooled from the map of this stride


class AlignedPool(nn.Module):
    """RoIAlign with as many samples a cell as it has pixels, on the level of a pyramid that suits a box's size."""

    def __init__(self, side: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.side, self.strides = side, tuple(strides)

    def forward(self, features: dict[str, Tensor], boxes: Boxes, image_shapes: Any = None) -> Tensor:
        """Maps (boxes, channels, side, side) of the boxes of all images, in their order."""
        maps = list(features.values())[: len(self.strides)]
        numbers = [box.new_full((len(box), 1), number) for number, box in enumerate(boxes)]
        regions = torch.cat([torch.cat(pair, dim=1) for pair in zip(numbers, boxes, strict=True)])
        levels = self.level_of(regions[:, 1:])
        members = [(levels == level).nonzero().ravel() for level in range(len(maps))]
        pooled = [
            roi_align(level, regions[member], self.side, 1 / stride, sampling_ratio=0, aligned=True)
            for level, member, stride in zip(maps, members, self.strides, strict=True)
        ]
        return torch.cat(pooled)[torch.cat(members).argsort()]

    def level_of(self, boxes: Tensor) -> Tensor:
        """The level of each box: one up for every doubling of its side."""
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        level = torch.floor(math.log2(CANONICAL_STRIDE) + torch.log2(area.sqrt() / CANONICAL_SIDE + 1e-8))
        lowest = math.log2(self.strides[0])
        return (level - lowest).clamp(0, len(self.strides) - 1).long()


class Float32(nn.Module):
    """A layer whose outputs are coordinates or scores, which bf16 would round too coarsely."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.float())


class Proposals(RegionProposalNetwork):
    """The region proposal network with an L1 loss, both losses divided by the regions that are to be sampled."""

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        positive, negative = (torch.cat(chosen).nonzero().ravel() for chosen in self.fg_bg_sampler(labels))
        sampled = torch.cat([positive, negative])
        total = self.fg_bg_sampler.batch_size_per_image * len(labels)
        truth = torch.cat(labels)[sampled]
        found = F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], truth, reduction="sum")
        moved = F.l1_loss(pred_bbox_deltas[positive], torch.cat(regression_targets)[positive], reduction="sum")
        return found / total, moved / total


class Heads(RoIHeads):
    """Class and box of every proposal and, where the detector has a mask branch, its mask.

    With `shared` the masks are predicted from the box head's maps (C4) instead of from a head of their own.
    """

    shared = False

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Losses when training, else what was found in every image."""
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, image_shapes, targets)
        maps = self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        found = self.postprocess_detections(*self.box_predictor(maps), proposals, image_shapes)
        results = [dict(zip(("boxes", "scores", "labels"), one)) for one in zip(*found, strict=True)]
        if self.has_mask():
            boxes, labels = [one["boxes"] for one in results], torch.cat([one["labels"] for one in results])
            logits = self.mask_predictor(self._mask_maps(features, boxes, image_shapes)).float()
            chosen = logits[torch.arange(len(labels), device=labels.device), labels].sigmoid()
            for one, masks in zip(results, chosen.split([len(box) for box in boxes]), strict=True):
                one["masks"] = masks
        return results, {}

    def _mask_maps(self, features: dict[str, Tensor], boxes: Boxes, shapes: list[tuple[int, int]]) -> Tensor:
        if self.shared:
            return self.box_head(self.box_roi_pool(features, boxes, shapes))
        return self.mask_head(self.mask_roi_pool(features, boxes, shapes))

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        proposals, matched, labels, regression = self.select_training_samples(proposals, targets)
        maps = self.box_head(self.box_roi_pool(features, proposals, shapes))
        logits, moves = self.box_predictor(maps)
        truth, aims = torch.cat(labels), torch.cat(regression)
        positive = (truth > 0).nonzero().ravel()
        moves = moves.view(len(truth), -1, 4)[positive, truth[positive]]
        losses = {
            "loss_classifier": F.cross_entropy(logits, truth),
            "loss_box_reg": F.l1_loss(moves, aims[positive], reduction="sum") / len(truth),
        }
        if self.has_mask():
            places = [(label > 0).nonzero().ravel() for label in labels]
            boxes = [box[place] for box, place in zip(proposals, places, strict=True)]
            objects = [match[place] for match, place in zip(matched, places, strict=True)]
            mask_maps = maps[positive] if self.shared else self._mask_maps(features, boxes, shapes)
            mask_logits = self.mask_predictor(mask_maps).float()
            losses["loss_mask"] = mask_loss(mask_logits, truth[positive], boxes, objects, targets)
        return losses


def mask_loss(
    logits: Tensor, labels: Tensor, boxes: Boxes, objects: list[Tensor], targets: list[dict[str, Tensor]]
) -> Tensor:
    """Binary cross-entropy of the mask of the true class, over the proposals whose object has an outline."""
    masked = torch.cat([target["masked"][number] for target, number in zip(targets, objects, strict=True)])
    if not masked.any():
        return logits.sum() * 0  # still a function of all parameters, as several processes need
    chosen = logits[torch.arange(len(labels), device=labels.device), labels][masked]
    aims = [
        cut_out(target["masks"], box, number, logits.shape[-1])
        for target, box, number in zip(targets, boxes, objects, strict=True)
    ]
    return F.binary_cross_entropy_with_logits(chosen, torch.cat(aims)[masked])


def cut_out(masks: Tensor, boxes: Tensor, objects: Tensor, side: int) -> Tensor:
    """What lies of each box's object within the box, in side x side pixels that are 0 or 1."""
    regions = torch.cat([objects[:, None].to(boxes), boxes], dim=1)
    return (roi_align(masks[:, None].to(boxes), regions, side, aligned=True)[:, 0] >= 0.5).to(boxes)
