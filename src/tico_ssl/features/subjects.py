"""The model under evaluation: backbone of a run, backbone file, or any model by name, with given or random weights."""

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tico_ssl.config.sections import IMAGENET_MEAN, IMAGENET_STD, BackboneConfig, DataConfig
from tico_ssl.data.given import Given, as_source
from tico_ssl.data.source import Source
from tico_ssl.data.sources import open_training
from tico_ssl.features.extraction import image_batches, needed_side
from tico_ssl.features.homes import MODELS, home_of, is_model_name
from tico_ssl.features.lazy import LazyBackbone, described
from tico_ssl.networks.backbones import Backbone, build_backbone
from tico_ssl.networks.batch_norm import calibrate
from tico_ssl.networks.storage import load_backbone, save_backbone
from tico_ssl.results.run_folder import backbone_file, open_run
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.files import digest
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.randomness import derived_seed, generator

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


def open_subject(run: str | Path, data: Given | None = None) -> Subject:
    """Open a run folder, a backbone file, or a model by name, which then has random weights."""
    if is_model_name(run):
        config = _data_of_model(str(run), data)
        backbone = _build(str(run), config)
        return Subject(backbone, config, "untrained", 0, home_of(run), trained=False)
    file = backbone_file(run)
    seed = open_run(run).recipe().training.seed if Path(run).expanduser().is_dir() else 0
    backbone = load_backbone(run)
    return Subject(backbone, data_config(run, data, backbone), digest(file), seed, home_of(run))


def open_model(run: str | Path, data: Given | None, weights: str | Path | None = None) -> Subject:
    """The same where a model by name may come with a file of its weights; without one, it is said that they are
    random."""
    subject = open_subject(run if weights is None else import_model(run, weights, data), data)
    if not subject.trained:
        say(f"{run} has random weights; --weights FILE gives it trained ones")
    return subject


def import_model(name: str | Path, weights: str | Path, data: Given | None) -> Path:
    """Write a model with weights from another library as a backbone file, which all evaluations accept."""
    if not is_model_name(name):
        raise UserError(f"--weights goes with the name of a model, such as torchvision/resnet50, not with {name}")
    config = _data_of_model(str(name), data)
    backbone = _with_weights(str(name), config, Path(weights).expanduser())
    file = digest(Path(weights).expanduser())[:8]
    path = MODELS / f"{str(name).replace('/', '-')}-{file}-{config.image_size}.safetensors"
    save_backbone(backbone, path)
    return path


def _data_of_model(name: str, data: Given | None) -> DataConfig:
    """At the size of the images where they all have the same (at most 224 pixels), else at 224 pixels."""
    if data is None:
        raise UserError(f"{name}: say which images with --data")
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    if name.startswith("timm/"):
        import timm

        if (known := timm.get_pretrained_cfg(name.removeprefix("timm/"))) is not None:
            mean, std = known.mean, known.std
    config = DataConfig(source=as_source(data), image_size=USUAL_SIZE, mean=mean, std=std)
    images = open_training(config).images
    if images is None:
        return config
    return config.model_copy(update={"image_size": max(8, min(USUAL_SIZE, *images.shape[-2:]))})


def _build(name: str, config: DataConfig, stem: str = "auto") -> Backbone:
    described = BackboneConfig.model_validate({"name": name, "stem": stem, "zero_gamma": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_backbone(described, config.image_size, config.mean, config.std)


def _with_weights(name: str, config: DataConfig, path: Path) -> Backbone:
    """The model with the stem that fits the weights: for small images `auto` may choose another than they have."""
    state = _read_state(path)
    for stem in ("auto", "standard"):
        backbone = _build(name, config, stem)
        wanted = backbone.network.state_dict()
        prefix = _prefix(state, wanted)
        found = {key: state[prefix + key] for key in wanted if prefix + key in state}
        missing = [key for key in wanted if key not in found and not key.endswith("num_batches_tracked")]
        if missing:
            raise UserError(f"{path}: has no '{missing[0]}', which {name} needs (and {len(missing) - 1} more)")
        wrong = [key for key, value in found.items() if value.shape != wanted[key].shape]
        if not wrong:
            backbone.network.load_state_dict(found, strict=False)
            left = sorted(set(state) - {prefix + key for key in found})
            if left:
                shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
                say(f"{path.name}: {len(found)} tensors loaded; ignored: {shown}")
            return backbone
    theirs, ours = tuple(found[wrong[0]].shape), tuple(wanted[wrong[0]].shape)
    raise UserError(f"{path}: '{wrong[0]}' is {theirs}, and {name} for {config.image_size} pixels has {ours}")


def _read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a PyTorch checkpoint, by name."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or not a safetensors file ({error})") from error
    except Exception as error:  # a damaged or unsafe file fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: not a weights file that is safe to load ({reason})") from error
    for key in ("state_dict", "model", "teacher"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    state = {key: value for key, value in state.items() if isinstance(value, Tensor)} if isinstance(state, dict) else {}
    if not state:
        raise UserError(f"{path}: contains no named tensors")
    return state


def _prefix(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """The common prefix of the network's tensors in a checkpoint (`module.encoder_q.`), or an empty string."""
    first = next(iter(wanted))
    prefixes = [key.removesuffix(first) for key in state if key == first or key.endswith(f".{first}")]
    return max(prefixes, key=lambda prefix: sum(prefix + key in state for key in wanted), default="")


def data_config(run: str | Path, data: Given | None, backbone: Backbone) -> DataConfig:
    """The data of a run, or other images in the size of its backbone."""
    if Path(run).expanduser().is_dir():
        config = open_run(run).recipe().data
        return config if data is None else config.model_copy(update={"source": as_source(data), "limit": None})
    if data is None:
        raise UserError(f"{run}: say which images with --data")
    return DataConfig(source=as_source(data), image_size=backbone.image_size, mean=backbone.mean, std=backbone.std)


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
        return build_backbone(config, trained.image_size, trained.mean, trained.std)
