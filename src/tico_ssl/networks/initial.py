"""The weights that a backbone starts from: a model's public weights by name, a checkpoint of any origin, or a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tico_ssl.config.initial import require_initial
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.foreign import Match, Tensors, read_tensors, start_from
from tico_ssl.networks.storage import described_state, is_ours
from tico_ssl.results.run_folder import backbone_file
from tico_ssl.runtime.errors import UserError

ANY = "DEFAULT"  # torchvision's name for the best weights of a model


@dataclass(frozen=True)
class Initial:
    """Named tensors and where they come from; the normalisation that they were trained with, if that is known."""

    origin: str
    tensors: Tensors
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def load(self, backbone: Backbone, strict: bool = True) -> list[str]:
        """Load them into a backbone, and say what matched."""
        matched: Match = start_from(backbone, self.tensors, self.origin, strict)
        lines = [f"initial weights: {self.origin}", *(f"  {line}" for line in matched.lines())]
        if self.mean is not None and self.std is not None and self._otherwise(backbone):
            mean, std = (", ".join(f"{x:g}" for x in values) for values in (self.mean, self.std))
            lines.append(f"  they were trained with data.mean=[{mean}] data.std=[{std}], which suits them better")
        return lines

    def _otherwise(self, backbone: Backbone) -> bool:
        pairs = [*zip(self.mean or (), backbone.mean), *zip(self.std or (), backbone.std)]
        return len(self.mean or ()) == len(backbone.mean) and any(abs(a - b) > 5e-3 for a, b in pairs)


def initial_weights(source: str) -> Initial:
    """Read what `training.init` names."""
    public = require_initial(source)
    path = Path(source).expanduser()
    if public:
        return _public(source)
    if path.is_dir() or is_ours(path):
        state, about = described_state(backbone_file(path))
        return Initial(str(path), state, about.mean, about.std)
    return Initial(str(path), read_tensors(path))


def _public(source: str) -> Initial:
    """A model's own weights, which its library downloads unless it has them."""
    library, _, model = source.partition("/")
    try:
        return _of_torchvision(source, model) if library == "torchvision" else _of_timm(source, model)
    except UserError:
        raise
    except Exception as error:  # no network, no such weights: libraries fail in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"training.init '{source}': its weights cannot be had from {library} ({reason}); without a network, give a "
            "file of them with --init"
        ) from error


def _of_torchvision(source: str, model: str) -> Initial:
    from torchvision import models

    name, _, weights = model.partition(":")
    if name not in models.list_models(module=models):
        raise UserError(f"training.init '{source}': torchvision has no model '{name}'")
    chosen = models.get_model_weights(name)
    if weights and weights not in chosen.__members__:
        raise UserError(f"training.init '{source}': the weights of {name} are {', '.join(chosen.__members__)}")
    chosen = chosen[weights or ANY]
    transforms = chosen.transforms()
    network: nn.Module = models.get_model(name, weights=chosen)
    return Initial(f"{source} ({chosen})", network.state_dict(), tuple(transforms.mean), tuple(transforms.std))


def _of_timm(source: str, model: str) -> Initial:
    import timm

    if not timm.is_model(model):
        raise UserError(f"training.init '{source}': timm has no model '{model}'")
    network: Any = timm.create_model(model, pretrained=True)
    known = network.pretrained_cfg
    return Initial(source, network.state_dict(), tuple(known["mean"]), tuple(known["std"]))
