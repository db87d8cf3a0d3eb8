"""Shared by the two evaluations: a context with annotated pictures, and the comparison with a random backbone."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tico_ssl.data.formats.voc2007 import VOC_CLASSES
from tico_ssl.data.given import Given, as_source
from tico_ssl.evaluations._detection.outlines import coco_tools
from tico_ssl.evaluations._detection.pictures import Pictures
from tico_ssl.evaluations._detection.settings import RESULTLESS, Settings
from tico_ssl.evaluations._detection.splits import Splits, open_pictures
from tico_ssl.evaluations._detection.training import Job, train
from tico_ssl.features.homes import INITIAL, TRAINED, UNTRAINED
from tico_ssl.features.lazy import weights_digest
from tico_ssl.features.subjects import Subject, fresh_twin, open_others, open_subject
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.record import Result
from tico_ssl.runtime import distributed
from tico_ssl.runtime.device import choose_device
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import write_atomically
from tico_ssl.runtime.locks import InUse, alone_in
from tico_ssl.runtime.progress import say

POLL_SECONDS = 5.0  # between checks whether another command is done


@dataclass
class PictureContext:
    """A backbone to evaluate and annotated pictures. Detectors are kept in the backbone's folder."""

    subject: Subject
    splits: Splits
    source: str
    device: torch.device = field(default_factory=choose_device)
    protocol: str = "detection"
    others: dict[str, Subject] = field(default_factory=dict)
    """Models to compare with, by column."""


def open_picture_context(
    run: str | Path, data: Given | None = None, against: Sequence[str | Path] = ()
) -> PictureContext:
    """The backbone of a run, a COCO or VOC folder, and models to compare with."""
    source = None if data is None else as_source(data)
    if not isinstance(source, str):
        raise UserError("detection and segmentation need --data: one folder in COCO's or VOC's layout")
    subject = open_subject(run, data)
    if (channels := subject.backbone.config.channels) not in (1, 3):
        raise UserError(f"detection needs images of 1 or 3 channels, the backbone takes {channels}")
    others = open_others(run, against, subject)
    return PictureContext(subject, open_pictures(source, subject.seed), source, others=others)


def compare(context: PictureContext, settings: Settings, masks: bool) -> Result:
    """The same training with the pretrained backbone, a random one, and others. Interrupted, the same command
    resumes."""
    begun = time.perf_counter()
    splits, subject = context.splits, context.subject
    if splits.train.rule == "coco" or masks:
        coco_tools()
    if masks and not all(split.has_outlines for split in (splits.train, splits.test)):
        raise UserError(f"{context.source}: segmentation needs outlines of objects; there are none")
    settings = scheduled(settings, splits.train)
    home = subject.home / context.protocol / _name(context, settings)
    if distributed.is_main():
        home.mkdir(parents=True, exist_ok=True)
        described = {"settings": settings.model_dump(mode="json"), "data": context.source}
        write_atomically(home / "settings.json", json.dumps(described, indent=2) + "\n")
    distributed.barrier()
    say(f"writing to {home}")
    columns = _columns(context, settings)
    backbones = dict(columns.values())
    made = {}
    while left := [place for place in backbones if place not in made]:
        with claim(home, left) as place:
            job = Job(f"{context.protocol} {place}", splits, settings, masks, home / place, context.device)
            made[place] = train(job, backbones[place])
    numbers = {name: made[place] for name, (place, _) in columns.items()}
    data: dict[str, Any] = {
        "source": context.source,
        "train": len(splits.train),
        "test": len(splits.test),
        "split": splits.how,
        "classes": len(splits.train.classes),
        "rule": splits.test.rule,
    }
    if context.others:
        data["against"] = {name: other.described for name, other in context.others.items()}
    written = settings.model_dump(mode="json")
    seconds = round(time.perf_counter() - begun, 2)
    return Result(context.protocol, written, data, subject.checkpoint, settings.seed, numbers, seconds)


def _columns(context: PictureContext, settings: Settings) -> dict[str, tuple[str, Backbone]]:
    """For each column the folder of its detector, and its backbone. Other models have their weights in the name."""
    subject, columns = context.subject, {}
    if subject.trained:
        columns[TRAINED] = TRAINED, subject.backbone
    others = {
        name: (f"{name}-{weights_digest(backbone)[:8]}", backbone)
        for name, other in context.others.items()
        for backbone in [other.backbone if other.trained else fresh_twin(other.backbone, settings.seed)]
    }
    columns |= {name: one for name, one in others.items() if name == INITIAL}
    columns[UNTRAINED] = UNTRAINED, fresh_twin(subject.backbone, settings.seed)
    return columns | others


def scheduled(settings: Settings, train: Pictures) -> Settings:
    """Settings for the number of images. VOC itself, known by its classes, has its published schedule, whichever years
    there are."""
    published = train.rule != "coco" and set(train.classes) <= set(VOC_CLASSES)
    return settings if published else settings.for_images(len(train))


@contextmanager
def claim(home: Path, names: Sequence[str]) -> Iterator[str]:
    """Yields a name that no other command is working on, as soon as there is one, and locks it meanwhile.

    So the same command, started twice, trains both backbones in parallel, and each ends with both results. Where the
    system has no file locks, every name is free.
    """
    with ExitStack() as stack:
        told = False
        while (name := distributed.everyone(_free(home, names, stack))[0]) is None:
            if not told:
                say(f"waiting for {names[0]}, which another command trains")
                told = True
            time.sleep(POLL_SECONDS)
        yield name


def _free(home: Path, names: Sequence[str], stack: ExitStack) -> str | None:
    """Lock and return the first free name. The main process decides."""
    if not distributed.is_main():
        return None
    for name in names:
        try:
            stack.enter_context(alone_in(home / name, "another command trains it"))
        except InUse:
            continue
        return name
    return None


def _name(context: PictureContext, settings: Settings) -> str:
    """A short name for everything that determines weights and scores, so that other settings, images or annotations
    start a new training."""
    decisive: Sequence[Any] = [
        settings.model_dump(mode="json", exclude=RESULTLESS),
        context.subject.checkpoint,
        context.splits.train.fingerprint(),
        context.splits.test.fingerprint(),
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]
