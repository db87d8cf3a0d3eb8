"""Fine-tuning: all weights trained on all labels.

The baseline is an untrained backbone, trained from scratch in the same way. The fine-tuned backbone is kept as a
backbone file, with its classifier.
"""

from pathlib import Path
from time import perf_counter

from safetensors.torch import save
from torch import nn

from tico_ssl.evaluations._classification.fine_tuning import fine_tuned
from tico_ssl.evaluations._classification.settings import FineTuning, Positive
from tico_ssl.evaluations._context import Context
from tico_ssl.evaluations._estimate import Work
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import save_backbone
from tico_ssl.results.metrics import TOP1, TOP5
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime import distributed
from tico_ssl.runtime.files import written_atomically
from tico_ssl.runtime.progress import say

COST = "network"
METRICS = (TOP1, TOP5)


class Config(FineTuning):
    """VICReg's learning rates for fine-tuning on 10 % of ImageNet; the paper does not fine-tune on all labels."""

    epochs: Positive = 30
    """Epochs over the training images; see `least_steps` for small data."""


def work(context: Context, config: Config) -> Work:
    """Every backbone is trained, and tested."""
    context.labels()
    return Work(len(context.test), config.images_seen(len(context.train))).times(len(context.backbones))


def run(context: Context, config: Config) -> Result:
    """Accuracy after fine-tuning, in per cent."""
    begun = perf_counter()
    context.labels()

    def measure(name: str) -> Numbers:
        def make(place: Path | None) -> Numbers:
            def keep(backbone: Backbone, head: nn.Module) -> None:
                if place is not None and name == "trained" and distributed.is_main():
                    _write(place.parent, backbone, head, context.train.classes)

            return fine_tuned(context, config, name, f"{context.protocol} {name}", place, keep=keep)

        return context.part(config, name, make)

    numbers = {name: measure(name) for name in context.backbones}
    return context.result(config, numbers, perf_counter() - begun)


def _write(folder: Path, backbone: Backbone, head: nn.Module, classes: tuple[str, ...]) -> None:
    """A backbone file as after pretraining, and the linear classifier on its features."""
    save_backbone(backbone, folder / "backbone.safetensors")
    state = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    with written_atomically(folder / "head.safetensors") as temporary:
        temporary.write_bytes(save(state, metadata={"classes": "\n".join(classes)}))
    say(f"fine-tuned backbone and classifier: {folder}")
