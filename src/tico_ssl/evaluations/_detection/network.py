"""Faster R-CNN and Mask R-CNN on a ResNet of this package, with a feature pyramid or on the third stage (C4)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead

from tico_ssl.evaluations._detection.heads import AlignedPool, Anchors, Float32, Heads, Proposals
from tico_ssl.evaluations._detection.samples import Batch
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError

STAGES = ("layer1", "layer2", "layer3", "layer4")
RATIOS = (0.5, 1.0, 2.0)

Mean = tuple[float, ...]


class Detector(nn.Module):
    """Backbone with its neck, region proposals, and heads on what is proposed."""

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, rpn: Proposals, roi_heads: Heads, mean: Mean, std: Mean) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = backbone, rpn, roi_heads
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> Any:
        """Losses when training, else the detections in every image: boxes, scores, labels, and masks."""
        features = self.features(batch)
        proposals, losses = self.rpn(batch, features)
        found, further = self.roi_heads(batch, features, proposals)
        return further | losses if self.training else found

    def features(self, batch: Batch) -> dict[str, Tensor]:
        """Feature maps by name; channels last on GPUs, which bf16 convolutions prefer."""
        pixels = self.normalised(batch)
        if pixels.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        maps: dict[str, Tensor] = self.backbone(pixels)
        return maps

    def normalised(self, batch: Batch) -> Tensor:
        """Images normalised as in pretraining; padding is zero, the mean."""
        pixels = (batch.images.float() / 255 - self.mean) / self.std
        rows, columns = (torch.arange(side, device=pixels.device) for side in pixels.shape[-2:])
        height, width = batch.sizes[:, :, None, None].unbind(1)
        inside = (rows[:, None] < height) & (columns < width)
        return pixels * inside[:, None]


def build_detector(backbone: Backbone, classes: int, settings: Settings, masks: bool) -> Detector:
    """A detector with a copy of this backbone and new layers; every layer is trained."""
    network = _resnet(backbone)
    widths, strides = _shape(network, backbone.config.channels)
    make = _pyramid if settings.neck == "fpn" else _third_stage
    body, rpn, heads = make(network, widths, strides, classes + 1, settings, masks)
    rpn.head.cls_logits, rpn.head.bbox_pred = Float32(rpn.head.cls_logits), Float32(rpn.head.bbox_pred)
    detector = Detector(body, rpn, heads, backbone.mean, backbone.std)
    return detector.requires_grad_(True)


def _resnet(backbone: Backbone) -> nn.Module:
    network = backbone.network
    if not all(isinstance(getattr(network, name, None), nn.Module) for name in ("conv1", "bn1", "maxpool", *STAGES)):
        raise UserError(f"detection needs a ResNet, and '{backbone.config.name}' is none")
    return copy.deepcopy(network).float()


@torch.no_grad()
def _shape(network: nn.Module, channels: int) -> tuple[list[int], list[int]]:
    """Channels and stride of every stage, measured: a stem for small images has a four times smaller stride."""
    side = 128
    getter = IntermediateLayerGetter(copy.deepcopy(network).cpu().eval(), {stage: stage for stage in STAGES})
    maps = getter(torch.zeros(1, channels, side, side)).values()
    return [one.shape[1] for one in maps], [side // one.shape[-1] for one in maps]


Parts = tuple[nn.Module, Proposals, Heads]


def _pyramid(
    network: nn.Module, widths: list[int], strides: list[int], classes: int, settings: Settings, masks: bool
) -> Parts:
    norm = nn.BatchNorm2d if settings.neck_norm else None
    names = {stage: str(level) for level, stage in enumerate(STAGES)}
    width, kept = settings.width, settings.proposals
    body = BackboneWithFPN(network, names, widths, width, norm_layer=norm)
    sides = [stride * settings.anchor_scale for stride in (*strides, 2 * strides[-1])]
    rpn = _proposals(width, tuple((side,) for side in sides), before_nms=(2000, 1000), after_nms=(kept, kept))
    box_head = TwoMLPHead(width * 7 * 7, 4 * width)
    for layer in (box_head.fc6, box_head.fc7):
        nn.init.kaiming_uniform_(layer.weight, a=1)
        nn.init.zeros_(layer.bias)
    mask = {}
    if masks:
        mask = {
            "mask_roi_pool": AlignedPool(14, strides),
            "mask_head": MaskRCNNHeads(width, (width,) * 4, 1),
            "mask_predictor": _mask_predictor(width, width, classes),
        }
    predictor = _box_predictor(4 * width, classes)
    return body, rpn, _heads(AlignedPool(7, strides), box_head, predictor, settings.regions, mask)


def _third_stage(
    network: nn.Module, widths: list[int], strides: list[int], classes: int, settings: Settings, masks: bool
) -> Parts:
    norm = nn.BatchNorm2d(widths[3]) if settings.neck_norm else nn.Identity()
    box_head = nn.Sequential(network.get_submodule("layer4"), norm)
    body = IntermediateLayerGetter(network, {"layer3": "0"})
    sides = tuple(strides[2] * settings.anchor_scale * factor for factor in (0.25, 0.5, 1, 2, 4))
    kept = settings.proposals
    rpn = _proposals(widths[2], (sides,), before_nms=(12000, 6000), after_nms=(2 * kept, kept))
    pool = AlignedPool(14, strides[2:3])
    predictor = nn.Sequential(nn.AdaptiveAvgPool2d(1), _box_predictor(widths[3], classes))
    mask = {}
    if masks:
        predict = _mask_predictor(widths[3], settings.width, classes)
        mask = {"mask_roi_pool": pool, "mask_head": nn.Identity(), "mask_predictor": predict}
    heads = _heads(pool, box_head, predictor, settings.regions, mask)
    heads.shared = True
    return body, rpn, heads


def _proposals(
    width: int, sides: tuple[tuple[float, ...], ...], before_nms: tuple[int, int], after_nms: tuple[int, int]
) -> Proposals:
    anchors = Anchors(sides, (RATIOS,) * len(sides))
    head = RPNHead(width, anchors.num_anchors_per_location()[0])
    before, after = (dict(zip(("training", "testing"), counts)) for counts in (before_nms, after_nms))
    return Proposals(anchors, head, 0.7, 0.3, 256, 0.5, before, after, 0.7)


def _heads(
    pool: nn.Module, box_head: nn.Module, predictor: nn.Module, regions: int, mask: dict[str, nn.Module]
) -> Heads:
    return Heads(
        box_roi_pool=pool,
        box_head=box_head,
        box_predictor=predictor,
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=regions,
        positive_fraction=0.25,
        bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
        **mask,
    )


def _box_predictor(width: int, classes: int) -> Float32:
    predictor = FastRCNNPredictor(width, classes)
    for layer, deviation in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
        nn.init.normal_(layer.weight, std=deviation)
        nn.init.zeros_(layer.bias)
    return Float32(predictor)


def _mask_predictor(maps: int, width: int, classes: int) -> MaskRCNNPredictor:
    predictor = MaskRCNNPredictor(maps, width, classes)
    nn.init.normal_(predictor.mask_fcn_logits.weight, std=0.001)
    for layer in (predictor.conv5_mask, predictor.mask_fcn_logits):
        nn.init.zeros_(layer.bias)
    return predictor
