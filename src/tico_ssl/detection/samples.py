"""What a detector is fed: resized images with their boxes and masks, in an order that the seed and the step decide."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tico_ssl import distributed
from tico_ssl.data.bad_files import in_order
from tico_ssl.data.decoding import decode
from tico_ssl.data.loader import sent
from tico_ssl.data.streaming import default_workers
from tico_ssl.detection.outlines import pixels
from tico_ssl.detection.pictures import Picture
from tico_ssl.detection.settings import Settings
from tico_ssl.errors import UserError
from tico_ssl.randomness import generator

Target = dict[str, Tensor]  # torchvision's form: boxes, labels, and with masks also masks, masked


class Sample(NamedTuple):
    """An image (uint8) as the network gets it, the objects to train on, and its size on disk."""

    image: Tensor
    target: Target
    original: tuple[int, int]

    def image_on(self, device: torch.device) -> Tensor:
        """The image on a device, between 0 and 1."""
        return sent(self.image, device).float() / 255

    def target_on(self, device: torch.device) -> Target:
        """The objects on a device."""
        return {name: sent(value, device) for name, value in self.target.items()}


class Task(NamedTuple):
    """What is to be made of a picture."""

    picture: Picture
    shorter: int
    mirrored: bool


class Maker:
    """Makes samples: reads, resizes, mirrors."""

    def __init__(self, channels: int, longest: int, masks: bool) -> None:
        self.channels, self.longest, self.masks = channels, longest, masks

    def __call__(self, task: Task) -> Sample:
        """A sample, the same for the same task."""
        picture = task.picture
        image = decode(picture.file, self.channels)
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
        return Sample(image.contiguous(), target, original)

    def _target(self, picture: Picture, original: tuple[int, int], size: tuple[int, int]) -> Target:
        instances = picture.trainable()
        scale = torch.tensor([size[1] / original[1], size[0] / original[0]]).repeat(2)
        target = {
            "boxes": torch.tensor([i.box for i in instances], dtype=torch.float32).reshape(-1, 4) * scale,
            "labels": torch.tensor([i.label for i in instances], dtype=torch.int64),
        }
        if self.masks:
            target["masks"] = torch.zeros(len(instances), *size, dtype=torch.uint8)
            target["masked"] = torch.tensor([i.outline is not None for i in instances], dtype=torch.bool)
            for number, instance in enumerate(instances):
                if instance.outline is not None:
                    try:
                        target["masks"][number] = pixels(instance.outline, original, size)
                    except (UserError, ValueError, TypeError, KeyError) as error:
                        raise UserError(f"{picture.file}: an object's outline cannot be read ({error})") from error
        return target


def resized_shape(height: int, width: int, shorter: int, longest: int) -> tuple[int, int]:
    """The shorter side gets so many pixels, unless the longer one would have too many."""
    scale = min(shorter / min(height, width), longest / max(height, width))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def mirrored(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Left and right exchanged."""
    width = image.shape[-1]
    boxes = target["boxes"][:, [2, 1, 0, 3]]
    boxes[:, 0::2] = width - boxes[:, 0::2]
    changed = target | {"boxes": boxes}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(-1)
    return image.flip(-1), changed


class TrainingSamples:
    """The training images of this process, step by step: every image once before any comes again."""

    def __init__(self, pictures: Sequence[Picture], maker: Maker, settings: Settings) -> None:
        world = distributed.world_size()
        if settings.batch_size % world:
            raise UserError(f"batch_size {settings.batch_size} is not a multiple of the {world} processes")
        self.pictures, self.maker, self.settings = pictures, maker, settings
        self.local = settings.batch_size // world
        self._orders: dict[int, list[int]] = {}

    def tasks(self, step: int) -> list[Task]:
        """Of this process in one step: a function of the seed and the step."""
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

    def iterate(self, start: int, stop: int) -> Iterator[list[Sample]]:
        """The samples of every step from one to another, read ahead."""
        tasks = (task for step in range(start, stop) for task in self.tasks(step))
        return samples(self.maker, tasks, self.local, self.settings.workers)

    def _place(self, number: int) -> int:
        """The image that comes as this number, counted from the beginning of training."""
        epoch, position = divmod(number, len(self.pictures))
        if epoch not in self._orders:
            order = torch.randperm(len(self.pictures), generator=generator(self.settings.seed, "order", epoch))
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1} | {epoch: order.tolist()}
        return self._orders[epoch][position]


def samples(maker: Maker, tasks: Iterable[Task], count: int, workers: int | None) -> Iterator[list[Sample]]:
    """Samples in order, so many at a time, made by threads: decoding and resizing let go of Python's lock."""
    threads = workers or default_workers()
    with ThreadPoolExecutor(threads) as pool:
        made = in_order(pool, maker, tasks, 2 * max(count, threads))
        while group := list(islice(made, count)):
            yield group
