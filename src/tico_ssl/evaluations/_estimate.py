"""How long a protocol will take that trains: a rough estimate, from a few steps on random images."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch

from tico_ssl.data.decoding import BadImage
from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.settings import Settings
from tico_ssl.evaluations._context import Context
from tico_ssl.networks.backbones import Backbone
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import autocast, one_thread, resolve_precision
from tico_ssl.views.executor import Views, sizes_of

GPU_BATCH, CPU_BATCH, FEWEST = 64, 16, 4  # images per measured step: the small batches of small data
PIXELS = 2**18  # of such a step on a CPU, at most, so that it is not for long
TIMED = 5  # steps, after one that does not count
FED = 16  # images that are decoded and cropped for a measurement


class Work(NamedTuple):
    """Images that pass through a network, each as often as it does: a frozen one, and one that is trained."""

    frozen: int = 0
    trained: int = 0

    def times(self, number: int) -> "Work":
        """The same for several networks."""
        return Work(number * self.frozen, number * self.trained)


@dataclass(frozen=True)
class Pace:
    """Seconds per image: through a frozen network, through one that is trained, and to decode and crop it."""

    frozen: float
    trained: float
    feeding: float
    ahead: bool = False
    """Whether other processors feed than compute, so that the slower of the two decides."""

    def seconds(self, work: Work) -> float:
        """Several processes share the images."""
        networks = ((work.frozen, self.frozen), (work.trained, self.trained))
        apart = sum(n * (max(each, self.feeding) if self.ahead else each + self.feeding) for n, each in networks)
        return apart / distributed.world_size()


def measure_pace(context: Context) -> Pace:
    """Time a copy of a backbone of each architecture and input size, and a few images; their mean over all
    backbones."""
    timed: dict[tuple[str, int], tuple[float, float, float]] = {}
    found = []
    for name, lazy in context.backbones.lazy.items():
        kind = lazy.like.config.name, lazy.like.image_size
        if kind not in timed:
            timed[kind] = _seconds_per_image(context, name)
        found.append(timed[kind])
    ahead = context.device.type == "cuda" and context.train.images is None
    frozen, trained, feeding = map(fmean, zip(*found))
    return Pace(frozen, trained, feeding, ahead)


def _seconds_per_image(context: Context, name: str) -> tuple[float, float, float]:
    """Through a backbone, frozen and trained, and to decode and crop."""
    device = context.device
    backbone = copy.deepcopy(context.backbones.lazy[name].like).to(device).requires_grad_(True)
    backbone = backbone.to(memory_format=torch.channels_last)
    with torch.random.fork_rng(devices=[]):  # a network may draw random numbers
        frozen, trained = _network_seconds(backbone, device)
    return frozen, trained, _feeding_seconds(context.train, backbone, device)


def _network_seconds(backbone: Backbone, device: torch.device) -> tuple[float, float]:
    """Seconds per image through a network, frozen and trained."""
    precision, side = resolve_precision("auto", device), backbone.image_size
    count = GPU_BATCH if device.type == "cuda" else max(FEWEST, min(CPU_BATCH, PIXELS // side**2))
    shape = (count, backbone.config.channels, side, side)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    images = images.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=1e-6, momentum=0.9)

    def mean_feature() -> torch.Tensor:
        with autocast(device, precision):
            features: torch.Tensor = backbone(images)
        return features.float().mean()

    @torch.no_grad()
    def frozen() -> None:
        backbone.eval()
        mean_feature().item()  # which waits for the device

    def trained() -> None:
        backbone.train()
        optimizer.zero_grad()
        mean_feature().backward()
        optimizer.step()
        next(backbone.parameters()).sum().item()

    return _median_seconds(frozen) / count, _median_seconds(trained) / count


def _median_seconds(step: Callable[[], object]) -> float:
    """Of a few steps, beside whatever else the machine does."""
    step()
    laps = []
    for _ in range(TIMED):
        begun = perf_counter()
        step()
        laps.append(perf_counter() - begun)
    return median(laps)


def _feeding_seconds(source: Source, backbone: Backbone, device: torch.device) -> float:
    """Seconds per image to make a view for training: of files with all workers busy, of images in memory on the
    device."""
    views = Views([Settings().policy()], backbone.image_size, backbone.mean, backbone.std)
    sample = source.limited(FED)
    uniforms = views.draw(len(sample), torch.Generator().manual_seed(0))
    if sample.images is not None:
        pixels = sample.take(torch.arange(len(sample))).to(device)
        decisions = views.decide(uniforms, sizes_of(pixels)).to(device)
        return _median_seconds(lambda: views.make(pixels, decisions)[0].sum().item()) / len(sample)
    with one_thread():  # as in a worker
        begun = perf_counter()
        for place, numbers in enumerate(uniforms[..., : views.place.width]):
            with suppress(BadImage):
                views.crop_bytes(sample.fetch(place), numbers)
        taken = perf_counter() - begun
    return taken / len(sample) / default_workers()
