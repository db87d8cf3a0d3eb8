"""The same training in another library, on the same images, batch and network.

lightly's TiCo is timed as in its example: PIL transforms in a DataLoader, float32, SGD. A second time it gets what
users might add: channels_last, and bf16 where this package uses it.
"""

import copy
import statistics
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tico_ssl.bench.stages import ENDLESS, Subject
from tico_ssl.bench.timing import time_calls
from tico_ssl.config.recipe import Recipe
from tico_ssl.config.views import SMALL_IMAGE
from tico_ssl.data.source import Source
from tico_ssl.methods import tico
from tico_ssl.networks.backbones import build_backbone
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.runtime.device import autocast
from tico_ssl.runtime.errors import UserError, suggestion

RIVALS = ("lightly",)
AHEAD = 2  # prefetch factor of the DataLoader


@dataclass(frozen=True)
class RivalSpeed:
    """Seconds per step of another library: on precomputed views, and with its own loader and transforms."""

    variant: str
    network_seconds: float
    training_seconds: float


def require(rival: str, recipe: Recipe) -> None:
    """Check what a comparison needs before anything is measured."""
    if rival not in RIVALS:
        raise UserError(f"--against={rival}: unknown library{suggestion(rival, RIVALS)}")
    try:
        import_module("lightly")
    except ImportError as error:
        raise UserError("--against=lightly: lightly is not installed (pip install lightly)") from error
    if recipe.method.name != "tico" or _settings(recipe).symmetric:
        raise UserError("--against=lightly compares TiCo as in the paper: method.name=tico, not symmetric")
    if recipe.backbone.channels != 3:
        raise UserError("--against=lightly: its transforms need images of three channels")


def _settings(recipe: Recipe) -> tico.Config:
    return tico.Config.model_validate(recipe.method.model_dump())


def time_lightly(subject: Subject, seconds: float) -> list[RivalSpeed]:
    """lightly's TiCo, as in its example and tuned."""
    tuned = "channels_last" + (", bf16" if subject.precision == torch.bfloat16 else "")
    variants = {"as in its example": (torch.float32, False), tuned: (subject.precision, True)}
    return [_time_variant(subject, seconds, name, *settings) for name, settings in variants.items()]


def _time_variant(
    subject: Subject, seconds: float, name: str, precision: torch.dtype, channels_last: bool
) -> RivalSpeed:
    torch.backends.cudnn.benchmark = channels_last  # the example does not set it; a step of this package may
    step = LightlyStep(subject.recipe, subject.device, precision, channels_last)
    first, second, *_ = subject.views.make(subject.raw.pixels, subject.raw.decisions)
    first, second = first.float(), second.float()
    network = time_calls(lambda: step(first, second), seconds, subject.device)
    return RivalSpeed(name, statistics.median(network), _time_training(subject, step, seconds))


def _time_training(subject: Subject, step: "LightlyStep", seconds: float) -> float:
    """Mean seconds per step with lightly's transforms in a DataLoader."""
    workers = default_workers()
    pictures = _Pictures(subject.source, _transform(subject.recipe.data.image_size))
    # One endless epoch: the example restarts its workers in every epoch, which is left out in its favour.
    order = RandomSampler(pictures, replacement=True, num_samples=ENDLESS)
    batches = iter(DataLoader(pictures, subject.batch, sampler=order, num_workers=workers, prefetch_factor=AHEAD))
    ahead = AHEAD * workers
    return statistics.fmean(time_calls(lambda: step(*next(batches)), seconds, subject.device, ahead, ahead))


class LightlyStep:
    """A training step built from lightly's parts, in the order of its example."""

    def __init__(self, recipe: Recipe, device: torch.device, precision: torch.dtype, channels_last: bool) -> None:
        self.device, self.precision = device, precision
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        models, data, settings = import_module("lightly.models.utils"), recipe.data, _settings(recipe)
        backbone = build_backbone(recipe.backbone, data.image_size, data.mean, data.std)
        head = import_module("lightly.models.modules.heads").TiCoProjectionHead(
            backbone.width, settings.hidden, settings.dim
        )
        self.online = nn.ModuleList([backbone, head]).to(device).to(memory_format=self.format)
        self.momentum = copy.deepcopy(self.online)
        models.deactivate_requires_grad(self.momentum)
        self.update_momentum = models.update_momentum
        self.schedule = import_module("lightly.utils.scheduler").cosine_schedule
        self.criterion = import_module("lightly.loss").TiCoLoss()
        self.optimizer = torch.optim.SGD(self.online.parameters(), lr=0.06)

    def __call__(self, first: Tensor, second: Tensor) -> None:
        """One step on two views."""
        decay = self.schedule(0, 10, 0.996, 1)
        for online, momentum in zip(self.online, self.momentum, strict=True):
            self.update_momentum(online, momentum, m=decay)
        first = first.to(self.device, memory_format=self.format)
        second = second.to(self.device, memory_format=self.format)
        with autocast(self.device, self.precision):
            loss = self.criterion(_embedded(self.online, first), _embedded(self.momentum, second).detach())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _embedded(network: nn.ModuleList, images: Tensor) -> Tensor:
    backbone, head = network
    embeddings: Tensor = head(backbone(images).flatten(start_dim=1))
    return embeddings


def _transform(size: int) -> Any:
    """TiCo's transform, without blur for small images, as in its CIFAR-10 example."""
    transforms = import_module("lightly.transforms.tico_transform")
    settings = {"input_size": size} | ({"gaussian_blur": 0.0} if size <= SMALL_IMAGE else {})
    return transforms.TiCoTransform(
        transforms.TiCoView1Transform(**settings), transforms.TiCoView2Transform(**settings)
    )


class _Pictures(Dataset[Any]):
    """The images of a source as PIL images, transformed."""

    def __init__(self, source: Source, transform: Any) -> None:
        self.source, self.transform = source, transform
        # Channels last in advance, as torchvision's data sets keep them.
        self.arrays = None if source.images is None else source.images.permute(0, 2, 3, 1).contiguous().numpy()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> Any:
        if self.arrays is not None:
            return self.transform(Image.fromarray(self.arrays[place]))
        return self.transform(Image.fromarray(self.source.fetch(place).permute(1, 2, 0).numpy()))
