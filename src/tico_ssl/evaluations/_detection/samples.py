"""Input of a detector: resized images with boxes and masks, in an order given by seed and step."""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl.config.sections import Limits
from tico_ssl.data.images import as_images
from tico_ssl.evaluations._detection.outlines import pixels
from tico_ssl.evaluations._detection.pictures import Picture
from tico_ssl.evaluations._detection.settings import Settings
from tico_ssl.pipeline.workers import arrays_ahead, chosen_workers
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import sent
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.randomness import generator
from tico_ssl.runtime.wording import counted

Target = dict[str, Tensor]  # boxes, labels; with masks also `masks` and `masked` (whether an object has one)
PADDED_TO = 32  # pixels: the coarsest stride
NO_BOX = (0.0, 0.0, 1.0, 1.0)  # padding where an image has fewer objects than another; its class is 0
LEAST_SIDE = 1e-3  # pixels


class Sample(NamedTuple):
    """A uint8 image as the network gets it, and the objects to train on."""

    image: Tensor
    target: Target


class Batch(NamedTuple):
    """Images of a step (N, C, H, W), uint8, padded at the right and bottom, their sizes (height, width), and their
    objects: boxes (N, M, 4), classes (N, M; 0: no object), mask indices (N, M; -1: none), and bit-packed masks (K, H,
    bytes)."""

    images: Tensor
    sizes: Tensor
    boxes: Tensor
    labels: Tensor
    mask_of: Tensor
    masks: Tensor

    def on(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(sent(value, device) for value in self))


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples as one batch.

    Masks are padded by replication, so that a crop at the image's border is the same as without padding.
    """
    targets, sizes = [one.target for one in samples], [one.image.shape[-2:] for one in samples]
    height, width = (-(-max(sides) // PADDED_TO) * PADDED_TO for sides in zip(*sizes))
    images = torch.zeros(len(samples), samples[0].image.shape[0], height, width, dtype=torch.uint8)
    most = max(1, *(len(target["labels"]) for target in targets))
    boxes = torch.tensor(NO_BOX).repeat(len(samples), most, 1)
    labels, mask_of = (torch.full((len(samples), most), value) for value in (0, -1))
    masks = [np.zeros((0, height, width // 8), np.uint8)]
    known = 0
    for row, (sample, target, (h, w)) in enumerate(zip(samples, targets, sizes)):
        count = len(target["labels"])
        images[row, :, :h, :w] = sample.image
        boxes[row, :count], labels[row, :count] = target["boxes"], target["labels"]
        if "masks" in target:
            places = target["masked"].nonzero().ravel()
            mask_of[row, places] = torch.arange(known, known + len(places))
            known += len(places)
            pad = ((0, 0), (0, height - h), (0, width - w))
            masks.append(np.packbits(np.pad(target["masks"][places].numpy(), pad, mode="edge"), axis=-1))
    return Batch(images, torch.tensor(sizes), boxes, labels, mask_of, torch.from_numpy(np.concatenate(masks)))


def unpacked(batch: Batch) -> Tensor:
    """The masks of a batch (K, H, W), 0 or 1."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=batch.masks.device)
    return (batch.masks[..., None] >> shifts & 1).flatten(-2)


class Task(NamedTuple):
    """A picture with its augmentation."""

    picture: Picture
    shorter: int
    mirrored: bool


class Maker:
    """Makes samples: reads (values of more than eight bits by the backbone's limits), resizes, flips."""

    def __init__(self, channels: int, longest: int, masks: bool, limits: Limits | None = None) -> None:
        self.channels, self.longest, self.masks, self.limits = channels, longest, masks, limits

    @property
    def most_bytes(self) -> int:
        """Size of a padded image, at most."""
        return self.channels * (-(-self.longest // PADDED_TO) * PADDED_TO) ** 2

    def __call__(self, task: Task) -> Sample:
        """A sample; deterministic in the task."""
        picture = task.picture
        image = as_images(picture.file, self.channels, self.limits)[0]
        original = (image.shape[-2], image.shape[-1])
        if original != (picture.height, picture.width):
            raise UserError(
                f"{picture.file}: has {original[1]} x {original[0]} pixels, "
                f"its annotations say {picture.width} x {picture.height}"
            )
        size = resized_shape(*original, task.shorter, self.longest)
        image = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
        target = self._target(picture, original, size)
        if task.mirrored:
            image, target = mirrored(image, target)
        return Sample(image.contiguous(), target)

    def _target(self, picture: Picture, original: tuple[int, int], size: tuple[int, int]) -> Target:
        instances = picture.trainable()
        scale = torch.tensor([size[1] / original[1], size[0] / original[0]]).repeat(2)
        boxes = torch.tensor([i.box for i in instances], dtype=torch.float32).reshape(-1, 4) * scale
        solid = (boxes[:, 2:] - boxes[:, :2] > LEAST_SIDE).all(1)  # the log of a side must be finite
        instances, boxes = [one for one, kept in zip(instances, solid.tolist()) if kept], boxes[solid]
        target = {
            "boxes": boxes,
            "labels": torch.tensor([i.label for i in instances], dtype=torch.int64),
        }
        if self.masks:
            target["masks"] = torch.zeros(len(instances), *size, dtype=torch.uint8)
            target["masked"] = torch.tensor([i.outline is not None for i in instances], dtype=torch.bool)
            for number, instance in enumerate(instances):
                if instance.outline is not None:
                    try:
                        target["masks"][number] = pixels(instance.outline, original, size)
                    except ValueError as error:
                        raise UserError(f"{picture.file}: an object's outline {error}") from error
        return target


def resized_shape(height: int, width: int, shorter: int, longest: int) -> tuple[int, int]:
    """The shorter side at this size, unless the longer one would exceed its limit."""
    scale = min(shorter / min(height, width), longest / max(height, width))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def mirrored(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Horizontal flip."""
    width = image.shape[-1]
    boxes = target["boxes"][:, [2, 1, 0, 3]]
    boxes[:, 0::2] = width - boxes[:, 0::2]
    changed = target | {"boxes": boxes}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(-1)
    return image.flip(-1), changed


class TrainingSamples:
    """The training images of this process, step by step, in a new random order every epoch."""

    def __init__(self, pictures: Sequence[Picture], maker: Maker, settings: Settings) -> None:
        world = distributed.world_size()
        if settings.batch_size % world:
            raise UserError(f"batch_size {settings.batch_size} is not a multiple of the {counted(world, 'process')}")
        self.pictures, self.maker, self.settings = pictures, maker, settings
        self.local = settings.batch_size // world
        self._orders: dict[int, list[int]] = {}

    def tasks(self, step: int) -> list[Task]:
        """The tasks of this process in one step: a function of seed and step."""
        settings = self.settings
        size, flip = torch.rand(2, settings.batch_size, generator=generator(settings.seed, "views", step)).tolist()
        first = distributed.rank() * self.local
        return [
            Task(
                self.pictures[self._place(step * settings.batch_size + number)],
                settings.sizes[int(size[number] * len(settings.sizes))],
                flip[number] < settings.flip,
            )
            for number in range(first, first + self.local)
        ]

    def iterate(self, start: int, stop: int, device: torch.device) -> Generator[Batch]:
        """Batches of the steps from `start` to `stop` on a device, loaded ahead."""
        steps, most = range(start, stop), self.local * self.maker.most_bytes
        return batches(lambda step: map(self.maker, self.tasks(step)), steps, self.settings.workers, most, device)

    def _place(self, number: int) -> int:
        """The index of the n-th image since the beginning of training."""
        epoch, position = divmod(number, len(self.pictures))
        if epoch not in self._orders:
            order = torch.randperm(len(self.pictures), generator=generator(self.settings.seed, "order", epoch))
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1} | {epoch: order.tolist()}
        return self._orders[epoch][position]


def batches(
    samples_of: Callable[[int], Iterable[Sample]],
    numbers: range,
    workers: int | None,
    capacity: int,
    device: torch.device,
) -> Generator[Batch]:
    """Batches of samples on a device, in order, loaded ahead by worker processes."""

    def arrays(number: int) -> list[np.ndarray]:
        return [value.numpy() for value in collate(list(samples_of(number)))]

    for made in arrays_ahead(arrays, numbers, workers_for(numbers, workers), capacity):
        batch = Batch(*map(torch.from_numpy, made))
        yield Batch(*(value.clone() for value in batch)) if device.type == "cpu" else batch.on(device)


def workers_for(numbers: range, workers: int | None) -> int:
    """The configured number of workers, or one per processor; at most one per number."""
    return max(1, min(chosen_workers(workers), len(numbers)))
