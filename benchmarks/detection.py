"""The package's detector against torchvision's Mask R-CNN on the same work: one training step.

    python benchmarks/detection.py [--images 16] [--side 320] [--steps 20] [--out FILE]

Both have a ResNet-18 with a feature pyramid and BatchNorm in it, the same heads, 81 classes, 1,000 proposals and 512
regions per image, and get the same images, boxes and masks. A step is forward, losses, backward and SGD.
torchvision loops over the images; the package batches targets, sampling, suppression and masks.
`operators` counts the calls of torch operators in a step, `waits` (on a GPU) those that synchronise with the host.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from tico_ssl.config.sections import BackboneConfig
from tico_ssl.evaluations._detection.network import STAGES, build_detector
from tico_ssl.evaluations._detection.samples import Batch, Sample, collate, unpacked
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime.device import autocast, choose_device, resolve_precision

CLASSES, OBJECTS = 80, 7  # COCO's number of classes, and its mean number of objects per image
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item")  # operators that synchronise with the host

Losses = Callable[[], dict[str, Tensor]]


def pictures(images: int, side: int) -> Batch:
    """Noise with boxes, and a filled rectangle as the mask of each."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(images):
        corner = side * 0.6 * torch.rand(OBJECTS, 2, generator=random)
        extent = side * (0.05 + 0.35 * torch.rand(OBJECTS, 2, generator=random))
        boxes = torch.cat([corner, corner + extent], dim=1)
        masks = torch.zeros(OBJECTS, side, side, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top : bottom + 1, left : right + 1] = 1
        target = {
            "boxes": boxes,
            "labels": torch.randint(1, CLASSES + 1, (OBJECTS,), generator=random),
            "masks": masks,
            "masked": torch.ones(OBJECTS, dtype=torch.bool),
        }
        samples.append(Sample(torch.randint(256, (3, side, side), generator=random, dtype=torch.uint8), target))
    return collate(samples)


def own(batch: Batch, device: torch.device) -> tuple[nn.Module, Losses]:
    """The package's detector with the paper's settings."""
    backbone = build_backbone(BackboneConfig(name="torchvision/resnet18", stem="standard"), 224)
    detector = build_detector(backbone, CLASSES, Settings(), masks=True).to(device).train()
    if device.type == "cuda":
        detector = detector.to(memory_format=torch.channels_last)
    return detector, lambda: detector(batch)


def of_torchvision(batch: Batch, device: torch.device) -> tuple[nn.Module, Losses]:
    """torchvision's detector with the same backbone and sizes."""
    network = build_backbone(BackboneConfig(name="torchvision/resnet18", stem="standard"), 224).network
    names = {stage: str(level) for level, stage in enumerate(STAGES)}
    body = BackboneWithFPN(network, names, [64, 128, 256, 512], 256, norm_layer=nn.BatchNorm2d)
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    side = int(batch.images.shape[-1])
    detector = MaskRCNN(
        body,
        CLASSES + 1,
        min_size=side,
        max_size=side,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=2000,
        rpn_post_nms_top_n_train=1000,
        box_batch_size_per_image=512,
    )
    detector = detector.to(device).train()
    if device.type == "cuda":
        detector = detector.to(memory_format=torch.channels_last)
    images = [image.float() / 255 for image in batch.images]
    masks = unpacked(batch)
    targets = [
        {"boxes": boxes, "labels": labels, "masks": masks[places]}
        for boxes, labels, places in zip(batch.boxes, batch.labels, batch.mask_of, strict=True)
    ]
    return detector, lambda: detector(images, targets)


class Counting(TorchDispatchMode):
    """Counts operators, and those that synchronise with the host."""

    operators = waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.waits += str(func).startswith(WAITS)
        return func(*args, **(kwargs or {}))


def measure(
    name: str, model: nn.Module, losses: Losses, images: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """The median time of a step, and its operators."""
    precision = resolve_precision("auto", device)
    fast: Any = {"fused": True} if device.type == "cuda" else {"foreach": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, **fast)

    def step() -> float:
        begin = time.perf_counter()
        with autocast(device, precision):
            found = losses()
        optimizer.zero_grad(set_to_none=True)
        torch.stack([value.float() for value in found.values()]).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(max(2, steps // 4)):
        step()
    seconds = statistics.median(step() for _ in range(steps))
    with Counting() as counted:
        step()
    return {
        "detector": name,
        "images_per_second": round(images / seconds, 2),
        "milliseconds": round(1000 * seconds, 1),
        "operators": counted.operators,
        "waits": counted.waits,
        "precision": str(precision).removeprefix("torch."),
    }


def main() -> None:
    """Print one JSON line for each detector."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--side", type=int, default=320, help="pixels, a multiple of 32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device()
    batch = pictures(arguments.images, arguments.side).on(device)
    about = {"images": arguments.images, "side": arguments.side, "objects": OBJECTS}
    lines: list[dict[str, Any]] = [{"machine": environment(), "threads": torch.get_num_threads(), **about}]
    for name, make in (("tico_ssl", own), ("torchvision", of_torchvision)):
        torch.manual_seed(0)
        lines.append(measure(name, *make(batch, device), arguments.images, arguments.steps, device))
        print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
