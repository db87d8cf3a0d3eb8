"""Detections in the pixels of the original images; several processes share the images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tico_ssl.config.sections import Limits
from tico_ssl.evaluations._detection.network import Detector
from tico_ssl.evaluations._detection.outlines import encoded, pasted
from tico_ssl.evaluations._detection.pictures import Picture
from tico_ssl.evaluations._detection.samples import Maker, Task, batches, workers_for
from tico_ssl.evaluations._detection.scoring import Found
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.pipeline.workers import ahead
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import autocast
from tico_ssl.runtime.progress import track

CHUNK = 512  # images whose small masks are in memory before they are pasted


@torch.no_grad()
def find_objects(
    detector: Detector,
    pictures: Sequence[Picture],
    channels: int,
    settings: Settings,
    device: torch.device,
    precision: torch.dtype,
    label: str | None = None,
    limits: Limits | None = None,
) -> list[Found]:
    """Detections in every picture, in their order; the same list in every process."""
    training, world, rank = detector.training, distributed.world_size(), distributed.rank()
    detector.eval()
    mine = pictures[rank::world]
    maker = Maker(channels, settings.longest, masks=False, limits=limits)
    # One at a time: in a batch, detections would depend on the padding, and so on the other images.
    tasks = [Task(picture, settings.test_size, False) for picture in mine]
    every = range(len(mine))
    made = batches(lambda number: [maker(tasks[number])], every, settings.workers, maker.most_bytes, device)
    found: list[Found] = []
    seen: list[Seen] = []
    for number, batch in enumerate(track(made, len(mine), label), 1):
        with autocast(device, precision):
            (result,) = detector(batch)
        seen.append({name: value.float().cpu() for name, value in result.items()} | {"size": batch.sizes[0].cpu()})
        if len(seen) == CHUNK or number == len(mine):
            found += in_originals(seen, mine[number - len(seen) : number], settings.workers)
            seen.clear()
    detector.train(training)
    parts = distributed.everyone(found)
    return [parts[place % world][place // world] for place in range(len(pictures))]


Seen = dict[str, Tensor]


def in_originals(seen: Sequence[Seen], pictures: Sequence[Picture], workers: int | None) -> list[Found]:
    """Detections in resized images (of `size`), converted to the pixels of the original images."""

    def found(number: int) -> Found:
        return in_original(seen[number], pictures[number].height, pictures[number].width)

    if not any(len(one.get("masks", ())) for one in seen):
        return [found(number) for number in range(len(seen))]
    return list(ahead(found, range(len(seen)), workers_for(range(len(seen)), workers)))


def in_original(seen: Seen, height: int, width: int) -> Found:
    """The same for one image."""
    scale = torch.tensor([width, height]) / seen["size"].flip(0)
    boxes = seen["boxes"] * scale.repeat(2)
    masks = None
    if "masks" in seen:
        masks = encoded([pasted(mask, box, height, width) for mask, box in zip(seen["masks"], boxes, strict=True)])
    return Found(boxes.numpy(), seen["scores"].numpy(), seen["labels"].long().numpy(), masks)
