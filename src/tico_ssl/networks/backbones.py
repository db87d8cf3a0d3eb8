"""Backbones by name: `torchvision/resnet50`, `timm/vit_small_patch16_224`, or the narrow `tico/resnet18-w16`.

The classifier is removed, the width of the pooled features is found by a trial run, and ResNets for small images get a
smaller stem. Parameter names stay the library's own, so weights move freely between libraries. A library is
imported when one of its models is built: importing either takes a second or more, and losses need none.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tico_ssl.config.sections import BACKBONE_LIBRARIES, IMAGENET_MEAN, IMAGENET_STD, BackboneConfig, Limits
from tico_ssl.data.images import ImageLike, as_images
from tico_ssl.networks import weight_standardisation
from tico_ssl.networks.blocks import residual_blocks
from tico_ssl.networks.narrow_resnet import NarrowResNet
from tico_ssl.networks.stems import adapt_stem, like
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.views import operations
from tico_ssl.views.centre import centre_crop

LOADING = re.compile("pretrained|checkpoint|^weights|cache|url|hub")  # what loads files, in any version of a library


class Backbone(nn.Module):
    """Images to pooled features. `network` is the library's own module without its classifier."""

    def __init__(
        self,
        network: nn.Module,
        config: BackboneConfig,
        image_size: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.config = config
        self.image_size = image_size
        self.mean, self.std = tuple(mean), tuple(std)
        self.limits = limits  # of values that become 0 to 255, where images have more than eight bits
        self.width = _feature_width(network, config, image_size)

    def forward(self, images: Tensor, views: int = 1) -> Tensor:
        """Features (batch, width) of normalised images, of which `views` equal parts have their own BatchNorm
        statistics."""
        if views == 1:  # without a chunk, which torch.export could not give a batch of any size
            return self.network(images)  # type: ignore[no-any-return]
        return torch.cat([self.network(view) for view in images.chunk(views)])

    @torch.no_grad()
    def preprocess(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Network input (N, C, size, size) from images of any size: centre crop, bicubic resize, normalisation. An
        image is a path, a Pillow image, an array (H, W, C) or a tensor (C, H, W), of bytes or of floats from 0 to 1;
        one of them, several, or a batch of one size."""
        ready = as_images(images, self.config.channels, self.limits)
        return operations.normalise(centre_crop(ready, self.image_size), self.mean, self.std)


def each(modules: Iterable[nn.Module], views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Several views through a sequence of modules, each view with its own BatchNorm statistics. A backbone gets views
    of one size together, which it may take in one pass."""
    outputs = tuple(views)
    for module in modules:
        alike = all(view.shape == outputs[0].shape for view in outputs)
        if isinstance(module, Backbone) and len(outputs) > 1 and alike:
            outputs = module(torch.cat(outputs), len(outputs)).chunk(len(outputs))
        else:
            outputs = tuple(module(view) for view in outputs)
    return outputs


def build_backbone(
    config: BackboneConfig,
    image_size: int,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    limits: Limits | None = None,
) -> Backbone:
    """A randomly initialised backbone for images of this size, normalisation and range of values."""
    return Backbone(build_network(config, image_size), config, image_size, mean, std, limits)


def build_network(config: BackboneConfig, image_size: int) -> nn.Module:
    """The library's module without its classifier, with the recipe's stem, initialisation and standardisation."""
    library, _, model = config.name.partition("/")
    if library not in LIBRARIES or not model:
        raise UserError(
            f"backbone.name '{config.name}' must be library/model with library one of {', '.join(sorted(LIBRARIES))}"
        )
    network = LIBRARIES[library](model, config, image_size)
    adapt_stem(network, config, image_size)
    scale_last_gamma(network, 0.0 if config.zero_gamma else 1.0)  # timm's own default is zero
    if config.weight_standardisation:
        weight_standardisation.apply(network)
    return network


def catalogue(library: str) -> list[str]:
    """The models of a library, by their names in a recipe."""
    if library == "timm":
        import timm

        return [f"timm/{name}" for name in timm.list_models()]
    if library == "torchvision":
        from torchvision import models

        return [f"torchvision/{name}" for name in models.list_models(module=models)]
    return ["tico/resnet10-w16", "tico/resnet18-w16", "tico/resnet18-w32"]


def _from_torchvision(model: str, config: BackboneConfig, image_size: int) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if model not in known:
        raise UserError(f"backbone.name: torchvision has no model '{model}'{_near(model, known)}")
    arguments = torchvision_arguments(model, config, image_size)
    _require_harmless(config, models.get_model)
    network = _construct(lambda: models.get_model(model, weights=None, **arguments), config)
    _remove_classifier(network)
    _set_input_channels(network, config.channels)
    return network


def torchvision_arguments(model: str, config: BackboneConfig, image_size: int) -> dict[str, Any]:
    """Arguments of the constructor, here and in the code that an export prints."""
    fixed: dict[str, Any] = {"image_size": image_size} if model.startswith("vit_") else {}
    if model in ("googlenet", "inception_v3"):
        fixed = {"aux_logits": False, "init_weights": True}  # auxiliary classifiers would make training return a tuple
    return fixed | config.arguments


def timm_arguments(model: str, config: BackboneConfig, image_size: int) -> dict[str, Any]:
    """The same for timm."""
    import timm

    fixed: dict[str, Any] = {"num_classes": 0, "in_chans": config.channels}
    if timm.models.is_model(model) and _takes_image_size(model):
        fixed["img_size"] = image_size
    return fixed | config.arguments


def _from_timm(model: str, config: BackboneConfig, image_size: int) -> nn.Module:
    import timm

    known = timm.list_models()
    if model.split(".")[0] not in known:
        raise UserError(f"backbone.name: timm has no model '{model}'{_near(model, known)}")
    arguments = timm_arguments(model, config, image_size)
    _require_harmless(config, timm.create_model, timm.models.build_model_with_cfg)
    return _construct(lambda: timm.create_model(model, pretrained=False, **arguments), config)


def _from_tico(model: str, config: BackboneConfig, image_size: int) -> nn.Module:
    match = re.fullmatch(r"resnet(10|18|34)-w(\d+)", model)
    if not match or int(match[2]) < 1:
        raise UserError(f"backbone.name: 'tico/{model}' must look like tico/resnet18-w16 (depth 10, 18 or 34)")
    blocks = {"10": (1, 1, 1, 1), "18": (2, 2, 2, 2), "34": (3, 4, 6, 3)}[match[1]]
    return NarrowResNet(blocks, int(match[2]), config.channels)


LIBRARIES: dict[str, Callable[[str, BackboneConfig, int], nn.Module]] = dict(
    zip(BACKBONE_LIBRARIES, (_from_torchvision, _from_timm, _from_tico), strict=True)
)


def _construct(make: Callable[[], nn.Module], config: BackboneConfig) -> nn.Module:
    try:
        return make()
    except Exception as error:  # a library's constructor refuses its arguments in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"backbone '{config.name}' cannot be built: {reason}") from error


def _require_harmless(config: BackboneConfig, *makers: Callable[..., Any]) -> None:
    """Pass on arguments of a network alone: plain values, and none that a library's own functions take, such as the
    path of a checkpoint to load. They may come from the metadata of a file with weights, so from anyone."""
    taken = {name for make in makers for name in inspect.signature(make).parameters}
    for name, value in config.arguments.items():
        if name in taken or LOADING.search(name):
            raise UserError(f"backbone.arguments: '{name}' is no argument of a network, and is not passed on")
        if not _is_plain(value):
            raise UserError(f"backbone.arguments: '{name}' must be a number, a name or a list of them")


def _is_plain(value: Any, levels: int = 4) -> bool:
    if isinstance(value, list | tuple):
        return levels > 0 and all(_is_plain(item, levels - 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _near(model: str, known: list[str]) -> str:
    hint = suggestion(model, known)
    return hint if "did you mean" in hint else "; `tico list backbones` shows them all"


def _takes_image_size(model: str) -> bool:
    """Transformers with fixed position embeddings need the image size; convolutional networks refuse the argument."""
    for base in inspect.getmro(_model_class(model)):
        if "img_size" in inspect.signature(base.__init__).parameters:  # type: ignore[misc]
            return True
    return False


def _model_class(model: str) -> type:
    import timm

    with torch.device("meta"):
        return type(timm.create_model(model, pretrained=False))


def _remove_classifier(network: nn.Module) -> None:
    """Replace the last linear layer, which in every torchvision classifier computes the logits, by the identity."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"{type(network).__name__} has no classifier to remove; use its timm version")
    parent, _, child = linear[-1].rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())


def _set_input_channels(network: nn.Module, channels: int) -> None:
    if channels == 3:
        return
    name, first = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, like(first, in_channels=channels))


def scale_last_gamma(network: nn.Module, value: float) -> None:
    """Set the weight of the last BatchNorm of every residual block; zero makes every block start as the identity."""
    kinds = residual_blocks()
    for block in (module for module in network.modules() if isinstance(module, kinds)):
        last: Any = block.bn3 if hasattr(block, "bn3") else block.bn2
        if isinstance(last.weight, Tensor):
            nn.init.constant_(last.weight, value)


@torch.no_grad()
def _feature_width(network: nn.Module, config: BackboneConfig, image_size: int) -> int:
    """Found by a forward pass of one image, in evaluation mode so that buffers do not change."""
    training = network.training
    try:
        features = network.eval()(torch.zeros(1, config.channels, image_size, image_size))
    except Exception as error:  # so do its networks with sizes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"backbone '{config.name}' does not take images of {image_size} pixels: {reason}") from error
    finally:
        network.train(training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise UserError(f"backbone '{config.name}' returns no pooled feature vector")
    return features.shape[1]
