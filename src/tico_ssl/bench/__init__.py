"""Training throughput on this machine, its upper bound, and where the time goes; see docs/speed.md."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tico_ssl.bench.ceilings import Ceilings, measure_ceilings
from tico_ssl.bench.feeding import Feeding, time_feeding
from tico_ssl.bench.methods import MethodCost, time_methods
from tico_ssl.bench.rivals import RivalSpeed, require, time_lightly
from tico_ssl.bench.roofline import Operation, Roofline, roofline, step_operations
from tico_ssl.bench.stages import Speed, Subject, time_execution, time_loader, time_stages
from tico_ssl.config.recipe import Recipe, load_recipe
from tico_ssl.config.sections import Execution
from tico_ssl.config.views import SMALL_IMAGE, shorter_side
from tico_ssl.data.arrays import from_arrays
from tico_ssl.data.given import Given, as_source
from tico_ssl.data.measuring import settled
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.pipeline.workers import default_workers
from tico_ssl.results.run_folder import environment
from tico_ssl.runtime import fallbacks
from tico_ssl.runtime.device import choose_device, resolve_precision, tune_process
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted
from tico_ssl.training.step import resolve_execution

FEWEST_IMAGES = 1024  # random images, at least, so that a loader has a choice


@dataclass(frozen=True)
class Report:
    """All measurements. Times are seconds per step of `batch` images."""

    device: str
    recipe: str
    network: str
    image_size: int
    batch: int
    precision: str
    images: str
    ceilings: Ceilings
    roofline: Roofline
    stages: dict[str, float]
    speeds: list[Speed]
    loader_seconds: float
    against: dict[str, list[RivalSpeed]]
    command: str
    machine: dict[str, Any] = field(repr=False)
    methods: list[MethodCost] = field(default_factory=list)
    methods_left_out: dict[str, str] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Fallbacks to a slower path, with reasons."""
    feeding: Feeding | None = None
    """Of the user's own images."""
    bound: str | None = None
    """What bounds training on them, in a sentence."""
    helps: list[str] = field(default_factory=list)
    """What would help."""
    doubt: str | None = None
    """Why the ceilings may be too low."""

    @property
    def utilisation(self) -> float:
        """The share of the roofline that the fastest step reaches: networks alone, or by chance one with more to do."""
        steps = ((speed.network_seconds, speed.step_seconds, speed.training_seconds) for speed in self.speeds)
        seconds = min(map(min, steps))
        return self.batch / seconds / self.roofline.images_per_second

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"


def bench(
    recipe: str | Path | Mapping[str, Any] | None = None,
    data: Given | None = None,
    overrides: Mapping[str, Any] | None = None,
    against: str | None = None,
    seconds: float = 2.0,
    compiled: bool = False,
    out: str | Path | None = None,
    methods: bool = False,
) -> Report:
    """Measure a recipe on this machine, on random images or on `data`; each measurement takes about `seconds`.

    With `data`, also what bounds training on them: decoding, cropping or the step. With `methods`, also one step of
    every method under the recipe's conditions.
    """
    device = choose_device()
    tune_process(device)
    name = recipe if recipe is not None else ("cifar10/tico" if device.type == "cuda" else "demo")
    changes = dict(overrides or {}) | ({} if data is None else {"data.source": as_source(data)})
    loaded = load_recipe(name, changes, say)
    if against is not None:
        require(against, loaded)
    if out is not None and not Path(out).expanduser().resolve().parent.is_dir():
        raise UserError(f"--out={out}: there is no such folder")
    try:
        report = _measure(loaded, str(name), data is not None, device, against, seconds, compiled, methods)
    except torch.OutOfMemoryError as error:
        batch = loaded.training.batch_size
        raise UserError(f"{counted(batch, 'image')} do not fit in GPU memory: lower training.batch_size") from error
    if out is not None:
        write_atomically(Path(out).expanduser(), report.as_json())
    return report


def _measure(
    recipe: Recipe,
    name: str,
    own_data: bool,
    device: torch.device,
    against: str | None,
    seconds: float,
    compiled: bool,
    methods: bool,
) -> Report:
    fallbacks.drain()  # of earlier work in this process
    precision = resolve_precision(recipe.training.precision, device)
    source = _open(recipe) if own_data else random_images(recipe)
    recipe = recipe.model_copy(update={"data": settled(recipe.data, source, recipe.backbone.channels)})
    subject = Subject.of(recipe, device, precision, source)
    ceilings, operations = measure_ceilings(device, precision, seconds), step_operations(recipe)
    machine = environment()
    cpu = f"{machine['processor']}, {counted(torch.get_num_threads(), 'thread')}"
    costs, left_out = time_methods(subject, seconds / 2) if methods else ([], {})
    report = Report(
        device=machine["gpu"] if device.type == "cuda" else cpu,
        recipe=name,
        network=recipe.backbone.name,
        image_size=recipe.data.image_size,
        batch=subject.batch,
        precision=str(precision).removeprefix("torch."),
        images=f"{subject.source.name}, {subject.loader.storage}",
        ceilings=ceilings,
        roofline=roofline(operations, ceilings, precision.itemsize),
        stages=time_stages(subject, seconds),
        speeds=[time_execution(subject, execution, seconds) for execution in _executions(device, compiled)],
        loader_seconds=time_loader(subject, seconds),
        against={} if against is None else {against: time_lightly(subject, seconds)},
        command=machine.pop("command"),
        machine=machine,
        methods=costs,
        methods_left_out=left_out,
    )
    report = _below_its_ceilings(report, operations, device, precision, seconds)
    return replace(_with_feeding(report, subject, seconds) if own_data else report, fallbacks=fallbacks.drain())


def _below_its_ceilings(
    report: Report, operations: list[Operation], device: torch.device, precision: torch.dtype, seconds: float
) -> Report:
    """Nothing is faster than its ceilings: if it seems so, measure them again, and take the higher ones."""
    if report.utilisation <= 1:
        return report
    ceilings = measure_ceilings(device, precision, seconds).higher(report.ceilings)
    again = replace(report, ceilings=ceilings, roofline=roofline(operations, ceilings, precision.itemsize))
    if again.utilisation <= 1:
        return replace(
            again, doubt="the machine was busy when its ceilings were measured first; they are of a second time"
        )
    caches = "" if device.type == "cuda" else ", or its caches hold what the roofline moves through memory"
    return replace(again, doubt=f"above 100 %: the machine was busy when its ceilings were measured, twice{caches}")


def _with_feeding(report: Report, subject: Subject, seconds: float) -> Report:
    """Also what bounds training on the user's own images."""
    step = min(speed.step_seconds for speed in report.speeds)
    feeding = time_feeding(subject, seconds, step, report.loader_seconds)
    return replace(
        report, feeding=feeding, bound=feeding.bound, helps=feeding.advice(subject.recipe.data, default_workers())
    )


def _executions(device: torch.device, compiled: bool) -> list[Execution]:
    """The ways in which this device can execute a step."""
    every: list[Execution] = ["eager", "captured"]
    every += ["compiled", "compiled and captured"] if compiled else []
    return [execution for execution in every if resolve_execution(execution, device) == execution]


def _open(recipe: Recipe) -> Source:
    shorter = shorter_side(recipe.views, recipe.data.image_size)
    return open_training(recipe.data, recipe.backbone.channels, shorter)


def random_images(recipe: Recipe) -> Source:
    """Random images of the size from which such views are cropped: 256 pixels for 224; small ones keep their size."""
    size = recipe.data.image_size
    side = size if size <= SMALL_IMAGE else round(size * 256 / 224)
    count = max(FEWEST_IMAGES, 2 * recipe.training.batch_size)
    shape = (count, recipe.backbone.channels, side, side)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return from_arrays(f"{count} random images of {side} pixels", pixels, None)
