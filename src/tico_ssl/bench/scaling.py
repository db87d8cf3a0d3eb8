"""A model of training on many GPUs: images per second, time and GPU hours of a recipe, and what a step sends.

    step(n, W) = operations F + n / (S R)  +  sum over collective operations of latency + bytes / bandwidth

for n images on each of W GPUs. R is the roofline of the recipe at the measured ceilings of the GPU, S the share of it
that captured steps reach, F the time that an operation takes however small it is. What is sent is not described here
but listed by one step of the recipe itself on the CPU. Nothing overlaps with anything. See docs/scaling.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tico_ssl.bench.ceilings import Ceilings
from tico_ssl.bench.roofline import operations_of, roofline
from tico_ssl.config.recipe import Recipe
from tico_ssl.methods._base import Batch, Method
from tico_ssl.networks.target import Target
from tico_ssl.runtime import distributed
from tico_ssl.runtime.distributed import Sent
from tico_ssl.runtime.randomness import generator
from tico_ssl.training.setup import build_method
from tico_ssl.views.executor import Views

TRACED = (2, 4)  # images of the two steps on the CPU: what a step sends grows linearly with them, or not at all
BESIDE = 1.08  # what target and online network take one after the other, as several processes run them: 6 to 9 % more
BF16 = 2  # bytes of a value


@dataclass(frozen=True)
class Gpu:
    """Measured ceilings, the share of the roofline that captured steps reach, and the seconds of an operation on few
    images."""

    name: str
    ceilings: Ceilings
    share: float
    operation_seconds: float


GPUS = {"h200": Gpu("NVIDIA H200", Ceilings(686e12, 4.15e12), 0.81, 10e-6)}
"""Fitted to benchmarks/logs/speed: TiCo and MoCo, ResNet-18 and ResNet-50, batches of 64 to 2,048, within 7 %."""


@dataclass(frozen=True)
class Links:
    """Bytes per second of each GPU, each way, inside a node and between nodes, and seconds of a hop. Stated, not
    measured."""

    per_node: int = 8
    inside: float = 450e9
    between: float = 50e9
    launch: float = 5e-6
    hop_inside: float = 1e-6
    hop_between: float = 5e-6

    def nodes(self, world: int) -> int:
        """Number of nodes of so many GPUs."""
        return -(-world // self.per_node)

    def bandwidth(self, world: int) -> float:
        """Of a ring: between nodes it runs over the network adapters of all GPUs of a node at once."""
        if self.nodes(world) == 1:
            return self.inside
        return min(self.inside, self.between * min(world, self.per_node))

    def latency(self, world: int) -> float:
        """Of one way through all GPUs: along a ring or along a tree, whichever is shorter."""
        nodes = self.nodes(world)
        ring = (world - nodes) * self.hop_inside + (nodes if nodes > 1 else 0) * self.hop_between
        tree = math.log2(min(world, self.per_node)) * self.hop_inside + math.log2(nodes) * self.hop_between
        return min(ring, tree)

    def seconds(self, sent: Sent, world: int) -> float:
        """Of one collective operation. A sum is a scatter and a gather."""
        if world == 1:
            return 0.0
        ways = 2 if sent.kind == "sum" else 1
        return self.launch + ways * self.latency(world) + bytes_sent(sent, world) / self.bandwidth(world)


def bytes_sent(sent: Sent, world: int) -> float:
    """Bytes that every process sends in a collective operation, the fewest possible."""
    if sent.kind == "sum":
        return 2 * sent.bytes * (world - 1) / world
    return sent.bytes * (world - 1)


@dataclass(frozen=True)
class Work:
    """A step of a recipe: images per second at the roofline, operations however few images, whether there is a target,
    and what is sent with each of `TRACED` images per process."""

    roofline: float
    operations: int
    has_target: bool
    traced: tuple[list[Sent], list[Sent]]

    def sent(self, images: int) -> list[Sent]:
        """What a process with so many images sends in a step."""
        few, more = TRACED
        grown = (images - few) / (more - few)
        pairs = zip(*self.traced, strict=True)
        return [one._replace(bytes=round(one.bytes + (two.bytes - one.bytes) * grown)) for one, two in pairs]

    def seconds(self, images: int, world: int, gpu: Gpu, links: Links) -> tuple[float, float]:
        """Of a step's computation, and of its communication."""
        computing = self.operations * gpu.operation_seconds + images / (gpu.share * self.roofline)
        computing *= BESIDE if self.has_target and world > 1 else 1.0
        return computing, sum(links.seconds(sent, world) for sent in self.sent(images))


def work_of(recipe: Recipe, gpu: Gpu) -> Work:
    """Make two steps of a recipe on the CPU, in a process that stands for two, and list what they do and send."""
    batch = recipe.training.batch_size
    settings = {"parts": 1, "execution": "eager", "recompute": False}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=settings)})
    if "bn_splits" in type(recipe.method).model_fields:  # groups of a batch do what the batch does
        recipe = recipe.model_copy(update={"method": recipe.method.model_copy(update={"bn_splits": 1})})
    traced, operations = [], []
    with distributed.pretended(2) as sent:
        method = build_method(recipe, torch.device("cpu"), torch.float32, fused=False)
        for images in TRACED:
            sent.clear()
            operations = operations_of(_WholeStep(method), _batch(recipe, images), images, batch)
            traced.append(list(sent))
    has_target = any(isinstance(module, Target) for module in method.modules())
    found = roofline(operations, gpu.ceilings, BF16)
    return Work(found.images_per_second, len(operations), has_target, (traced[0], traced[1]))


class _WholeStep(nn.Module):
    """A step as a function of a batch, without views and optimiser, which send nothing."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> None:
        self.method.zero_grad(set_to_none=True)
        self.method(batch).loss.backward()
        distributed.average_gradients(self.method.parameters())
        self.method.after_step(0.5)


def _batch(recipe: Recipe, images: int) -> Batch:
    data = recipe.data
    channels = recipe.backbone.channels  # of which a recipe may leave the mean to be found in the images
    mean, std = (data.mean, data.std) if len(data.mean) == channels else ((0.0,) * channels, (1.0,) * channels)
    views = Views(recipe.views, data.image_size, mean, std)
    pixels = torch.zeros(images, channels, data.image_size, data.image_size, dtype=torch.uint8)
    made = views(pixels, views.draw(images, generator(0, "views", 0)))
    return Batch(made, torch.arange(images), torch.zeros(images, dtype=torch.int64))


@dataclass(frozen=True)
class Row:
    """Training on so many GPUs. Seconds are those of a step; efficiency is images per GPU relative to one GPU with the
    same number of images."""

    gpus: int
    images_per_gpu: int
    batch: int
    computing_seconds: float
    sending_seconds: float
    images_per_second: float
    efficiency: float
    hours: float
    gpu_hours: float
    megabytes_sent: float


def row(work: Work, recipe: Recipe, images: int, world: int, per_gpu: int, gpu: Gpu, links: Links) -> Row:
    """The model for a number of GPUs with so many images each, over all epochs of the recipe."""
    alone, _ = work.seconds(per_gpu, 1, gpu, links)
    computing, sending = work.seconds(per_gpu, world, gpu, links)
    step, batch = computing + sending, per_gpu * world
    hours = recipe.training.epochs * (images // batch) * step / 3600
    return Row(
        gpus=world,
        images_per_gpu=per_gpu,
        batch=batch,
        computing_seconds=computing,
        sending_seconds=sending,
        images_per_second=batch / step,
        efficiency=alone / step,
        hours=hours,
        gpu_hours=hours * world,
        megabytes_sent=sum(bytes_sent(sent, world) for sent in work.sent(per_gpu)) / 1e6,
    )


def rows(
    work: Work, recipe: Recipe, images: int, worlds: Sequence[int], gpu: Gpu, links: Links, per_gpu: int | None = None
) -> list[Row]:
    """A row for each number of GPUs that the batch can be divided among, two images each at least. With `per_gpu`
    images on each, the batch grows with them."""
    found = []
    for world in worlds:
        share = per_gpu or recipe.training.batch_size // world
        divides = per_gpu is not None or recipe.training.batch_size % world == 0
        if divides and share >= 2 and images >= share * world:
            found.append(row(work, recipe, images, world, share, gpu, links))
    return found


@dataclass(frozen=True)
class Purpose:
    """What a process sends for one purpose in a step."""

    name: str
    operations: int
    megabytes: float
    seconds: float


def purposes(work: Work, world: int, per_gpu: int, links: Links) -> list[Purpose]:
    """What every process sends in a step, by purpose."""
    sent = work.sent(per_gpu)
    return [
        Purpose(
            name,
            sum(one.purpose == name for one in sent),
            sum(bytes_sent(one, world) for one in sent if one.purpose == name) / 1e6,
            sum(links.seconds(one, world) for one in sent if one.purpose == name),
        )
        for name in dict.fromkeys(one.purpose for one in sent)
    ]
