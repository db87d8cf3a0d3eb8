"""The model under evaluation: backbone of a run, backbone file, or any model by name, with given or random weights."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from tico_ssl.config.sections import FOUND, IMAGENET_MEAN, IMAGENET_STD, BackboneConfig, DataConfig
from tico_ssl.data.fingerprint import changed_images
from tico_ssl.data.given import Given, as_source, in_words, places_in
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.features.extraction import image_batches, needed_side
from tico_ssl.features.homes import MODELS, data_of, home_of, is_model_name, others_beside
from tico_ssl.features.lazy import LazyBackbone, described
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.networks.foreign import match, read_tensors
from tico_ssl.networks.storage import load_backbone, save_backbone
from tico_ssl.results.record import same_source
from tico_ssl.results.run_folder import Run, backbone_file, open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed, generator
from tico_ssl.runtime.wording import counted

USUAL_SIZE = 224  # pixels, where images have different sizes


@dataclass(frozen=True)
class Subject:
    """A backbone, the data to evaluate it on, and the folder of its results."""

    backbone: Backbone
    data: DataConfig
    checkpoint: str
    seed: int
    home: Path
    trained: bool = True
    given: str = ""
    """What it was given as."""
    pretrained_on: str | list[str] | None = None
    """The source that it was pretrained on; None if that is unknown."""

    @property
    def described(self) -> dict[str, str]:
        """As results describe a model that they compare with."""
        return {"model": self.given, "checkpoint": self.checkpoint}

    @property
    def has_seen_its_data(self) -> bool:
        """Whether it was pretrained on the data that it is evaluated on."""
        return self.pretrained_on is not None and same_source(self.pretrained_on, self.data.source)


def open_subject(run: str | Path, data: Given | DataConfig | None = None) -> Subject:
    """Open a run folder, a backbone file, or a model by name, which then has random weights."""
    if is_model_name(run):
        config = _data_of_model(str(run), data)
        backbone = _build(str(run), config)
        return Subject(backbone, config, "untrained", 0, home_of(run), trained=False)
    file = backbone_file(run)
    backbone, checkpoint = _opened(file)
    config = data_config(run, data, backbone)
    if not Path(run).expanduser().is_dir():
        return Subject(backbone, config, checkpoint, 0, home_of(run))
    seed, source = open_run(run).recipe().training.seed, data_of(open_run(run)).source
    others = same_source(source, config.source) and _are_others(open_run(run), backbone)
    if others and data is None:
        where = "say where they are with --data"
        raise UserError(f"{run} was trained on other images than '{in_words(source)}' here; {where}")
    return Subject(backbone, config, checkpoint, seed, home_of(run), pretrained_on=None if others else source)


def _are_others(run: Run, backbone: Backbone) -> bool:
    """Whether there are other images here by the name of those that a run was trained on. Where it began, or by their
    full path, they are its own, whatever has been done to them since."""
    config, begun = data_of(run), run.begun_in()
    places = [config.source] if isinstance(config.source, str) else config.source
    own = all(Path(place).expanduser().is_absolute() or not Path(place).exists() for place in places)
    if own or begun == Path.cwd() or not run.images_file.is_file():
        return False
    return bool(changed_images(open_training(config, backbone.config.channels), run.images_file))


def _opened(file: Path) -> tuple[Backbone, str]:
    """A backbone and the digest of its file, which a training may replace meanwhile."""
    checkpoint, backbone = digest(file), load_backbone(file)
    return (backbone, checkpoint) if digest(file) == checkpoint else _opened(file)


def open_others(run: str | Path, against: Sequence[str | Path], subject: Subject) -> dict[str, Subject]:
    """The models to compare a run with, by column, for images of the run's."""
    found = {}
    for name, other in others_beside(run, against).items():
        data = subject.data
        model = other.model if other.weights is None else import_model(other.model, other.weights, data)
        found[name] = replace(open_subject(model, data), given=other.given)
        theirs, ours = (one.backbone.config.channels for one in (found[name], subject))
        if theirs != ours:
            raise UserError(f"{other.given}: takes images of {counted(theirs, 'channel')}, and {run} takes {ours}")
    return found


def open_model(run: str | Path, data: Given | None, weights: str | Path | None = None) -> Subject:
    """The same where a model by name may come with a file of its weights; without one, it is said that they are
    random."""
    subject = open_subject(run if weights is None else import_model(run, weights, data), data)
    if not subject.trained:
        say(f"{run} has random weights; --weights gives it trained ones")
    return subject


def import_model(name: str | Path, weights: str | Path, data: Given | DataConfig | None) -> Path:
    """Write a model with weights from another library as a backbone file, which all evaluations accept."""
    if not is_model_name(name):
        raise UserError(f"--weights goes with the name of a model, such as torchvision/resnet50, not with {name}")
    config = _data_of_model(str(name), data)
    backbone = _with_weights(str(name), config, Path(weights).expanduser())
    file = digest(Path(weights).expanduser())[:8]
    path = MODELS / f"{str(name).replace('/', '-')}-{file}-{config.image_size}.safetensors"
    save_backbone(backbone, path)
    return path


def _data_of_model(name: str, data: Given | DataConfig | None) -> DataConfig:
    """At the size of the images where they all have the same (at most 224 pixels), else at 224 pixels."""
    if data is None:
        raise UserError(f"{name}: say which images with --data")
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    if name.startswith("timm/"):
        import timm

        if (known := timm.get_pretrained_cfg(name.removeprefix("timm/"))) is not None:
            mean, std = tuple(known.mean), tuple(known.std)
    given = data if isinstance(data, DataConfig) else DataConfig(source=as_source(data), image_size=USUAL_SIZE)
    images = open_training(given).images
    size = USUAL_SIZE if images is None else max(8, min(USUAL_SIZE, *images.shape[-2:]))
    return given.model_copy(update={"image_size": size, "mean": mean, "std": std})


def _build(name: str, config: DataConfig, stem: str = "auto") -> Backbone:
    described = BackboneConfig.model_validate({"name": name, "stem": stem, "zero_gamma": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_backbone(described, config.image_size, config.mean, config.std)


def _with_weights(name: str, config: DataConfig, path: Path) -> Backbone:
    """The model with the stem that fits the weights: for small images `auto` may choose another than they have."""
    tensors = read_tensors(path)
    for stem in ("auto", "standard"):
        backbone = _build(name, config, stem)
        found = match(backbone.network, tensors, adapt=False)
        if found.missing:
            more = f" (and {len(found.missing) - 1} more)" if len(found.missing) > 1 else ""
            raise UserError(f"{path}: has no '{found.missing[0]}', which {name} needs{more}")
        if found.whole:
            backbone.network.load_state_dict(found.found, strict=False)
            if found.ignored:
                say(f"{path.name}: {'; '.join(found.lines())}")
            return backbone
    tensor, (theirs, ours) = next(iter(found.unfit.items()))
    raise UserError(f"{path}: '{tensor}' is {theirs}, and {name} for {config.image_size} pixels has {ours}")


def data_config(run: str | Path, data: Given | DataConfig | None, backbone: Backbone) -> DataConfig:
    """The data of a run, or other images in the size of its backbone."""
    if isinstance(data, DataConfig):
        return data
    if Path(run).expanduser().is_dir():
        config, begun = data_of(open_run(run)), open_run(run).begun_in()
        if data is None:
            return config
        given = as_source(data)
        if begun not in (None, Path.cwd()):  # in results, paths that are not full are those of the run
            given = places_in(Path.cwd(), given)
        return config.model_copy(update={"source": given, "limit": None, "held_out": 0.0})
    if data is None:
        raise UserError(f"{run}: say which images with --data")
    size, mean, std, range = backbone.image_size, backbone.mean, backbone.std, backbone.limits or FOUND
    return DataConfig(source=as_source(data), image_size=size, mean=mean, std=std, range=range)


CALIBRATION_IMAGES = 2_560


def untrained_twin(
    trained: Backbone, train: Source, seed: int, device: torch.device, reduced_decoding: bool = True
) -> LazyBackbone:
    """The same architecture with untrained weights, its BatchNorm calibrated on the data for a fair comparison. It is
    identified by how it is made, so that its features can be found before it is built."""

    def make() -> Backbone:
        twin = fresh_twin(trained, seed).to(device)
        shuffled = train.subset(torch.randperm(len(train), generator=generator(seed, "split", 1))[:CALIBRATION_IMAGES])
        batches = (images for images, _ in image_batches(shuffled, twin, device))
        return calibrate(twin, batches)  # type: ignore[return-value]

    def identify() -> str | None:
        if (images := train.fingerprint()) is None:
            return None
        decoded = needed_side(trained) if reduced_decoding else None
        data = [images, seed, CALIBRATION_IMAGES, decoded, device.type]
        libraries = {name: version(name) for name in ("torch", "torchvision", "timm")}  # which draw the weights
        made = json.dumps(["untrained", described(trained), data, libraries])
        return hashlib.sha256(made.encode()).hexdigest()[:16]

    return LazyBackbone(trained, make, identify)


def fresh_twin(trained: Backbone, seed: int) -> Backbone:
    """The same architecture with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        # Zero-gamma is a training trick; it would make the twin shallower than a usual untrained network.
        config = trained.config.model_copy(update={"zero_gamma": False})
        return build_backbone(config, trained.image_size, trained.mean, trained.std, trained.limits)
