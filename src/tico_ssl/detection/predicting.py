"""What a detector finds in images, in the images' own pixels; several processes share the images."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN

from tico_ssl import distributed
from tico_ssl.detection.outlines import encoded, pasted
from tico_ssl.detection.pictures import Picture
from tico_ssl.detection.samples import Maker, Sample, Task, samples
from tico_ssl.detection.scoring import Found
from tico_ssl.detection.settings import Settings
from tico_ssl.device import autocast
from tico_ssl.progress import track


@torch.no_grad()
def find_objects(
    detector: GeneralizedRCNN,
    pictures: Sequence[Picture],
    channels: int,
    settings: Settings,
    device: torch.device,
    precision: torch.dtype,
    label: str | None = None,
) -> list[Found]:
    """What is found in every picture, in their order; the same list in every process."""
    training, world, rank = detector.training, distributed.world_size(), distributed.rank()
    detector.eval()
    mine = pictures[rank::world]
    tasks = (Task(picture, settings.test_size, False) for picture in mine)
    # One at a time: in a batch, what is found in an image would depend on how much the others make it be padded.
    made = samples(Maker(channels, settings.longest, masks=False), tasks, 1, settings.workers)
    found: list[Found] = []
    for (sample,) in track(made, len(mine), label):
        with autocast(device, precision):
            (result,) = detector([sample.image_on(device)])
        found.append(in_original(result, sample))
    detector.train(training)
    parts = distributed.everyone(found)
    return [parts[place % world][place // world] for place in range(len(pictures))]


def in_original(result: dict[str, Tensor], sample: Sample) -> Found:
    """A detector's output for the resized image, in the pixels of the image on disk."""
    height, width = sample.original
    scale = torch.tensor([width / sample.image.shape[-1], height / sample.image.shape[-2]]).repeat(2)
    boxes = result["boxes"].float().cpu() * scale
    masks = None
    if "masks" in result:
        small = result["masks"].float().cpu()
        masks = encoded([pasted(mask, box, height, width) for mask, box in zip(small, boxes, strict=True)])
    scores, labels = result["scores"].float().cpu(), result["labels"].cpu()
    return Found(boxes.numpy(), scores.numpy(), labels.numpy(), masks)
