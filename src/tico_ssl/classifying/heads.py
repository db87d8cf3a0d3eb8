"""The two kinds of classifier: a head on frozen features, or the whole network."""

import copy
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tico_ssl.classifying.held_out import divided, own_validation
from tico_ssl.classifying.model import ImageClassifier
from tico_ssl.classifying.settings import LinearHead, WholeNetwork
from tico_ssl.classifying.storage import About, read_classifier, save_classifier
from tico_ssl.config.views import shorter_side
from tico_ssl.data.source import Source
from tico_ssl.evaluations._classification.training import Classifier, Job, train_classifier
from tico_ssl.evaluations._context import Context
from tico_ssl.features.extraction import extract
from tico_ssl.features.linear import fit_probe, number_held_out
from tico_ssl.features.scores import top_accuracies
from tico_ssl.results.record import Numbers
from tico_ssl.runtime import distributed
from tico_ssl.runtime.files import remove_temporaries
from tico_ssl.runtime.progress import say
from tico_ssl.runtime.wording import counted

CHOICES = 20  # epochs that are compared, at most
STATE = "training-"  # beginning of the name of a folder with the state of a training


def fitted(context: Context, config: LinearHead, classes: tuple[str, ...]) -> tuple[ImageClassifier, Numbers]:
    """A linear head on the frozen backbone, and its weight decay."""
    backbone = next(iter(context.backbones.lazy.values()))

    def known(source: Source, label: str) -> tuple[Tensor, Tensor]:
        features, places = context.cache.extract(backbone, source, context.device, f"{label} features")
        assert source.labels is not None
        return features.to(context.device), source.labels[places].to(context.device)

    validation = own_validation(context, classes)
    if validation is not None:
        say(f"the weight decay is chosen on {counted(len(validation), 'image')} of {validation.name}")
    chosen_on = None if validation is None else known(validation, "validation")
    features, labels = known(context.train, "training")
    say(f"fitting a linear head to {counted(len(features), 'image')}")
    probe = fit_probe(features, labels, config, len(classes), chosen_on)
    images = len(chosen_on[1]) if chosen_on is not None else number_held_out(len(labels), config)
    chosen = {"weight_decay": probe.weight_decay, "validation_images": images}
    return ImageClassifier(backbone.built, probe.folded(), classes), chosen


def trained(
    context: Context, config: WholeNetwork, classes: tuple[str, ...], folder: Path
) -> tuple[ImageClassifier, Numbers]:
    """A copy of the whole network after the epoch that is best on held-out training images, and that epoch. State is
    kept in the folder, so that an interrupted training continues."""
    assert context.train.labels is not None
    own = own_validation(context, classes)
    kept, out = divided(context.train.labels, 0.0 if own else config.held_out, config.seed)
    validation = own or context.train.subset(out)
    kind = validation.name if own else "the training images, held out"
    chosen_by = (
        f"the best epoch on {counted(len(validation), 'image')} of {kind}" if len(validation) else "the last epoch"
    )
    say(f"training on {counted(len(kept), 'image')}; kept is {chosen_by}")
    state = folder / f"{STATE}{_identity(context, config)}"
    checkpoint = None if context.digest is None else state / "last.pt"
    best = BestEpoch(state / "best.safetensors", validation, context, classes)
    if distributed.is_main():
        for file in (state / "last.pt", best.file):
            remove_temporaries(file)
        if checkpoint is None or not checkpoint.is_file():
            best.file.unlink(missing_ok=True)  # of a training that did not come to a checkpoint
    backbone = copy.deepcopy(next(iter(context.backbones.values()))).requires_grad_(True)
    source = context.training_images(shorter_side([config.policy()], backbone.image_size)).subset(kept)
    job = Job("finetune", source, len(classes), config, context.device, checkpoint, best)
    classifier = train_classifier(job, backbone, [config.lr_head], config.lr_backbone)
    if distributed.is_main():
        model, about = read_classifier(best.file)
        return model, _numbers(about) | {"validation_images": len(validation)}
    return best.model(classifier), {}


def forget_state(folder: Path) -> None:
    """Remove the state of trainings, which a finished one no longer needs."""
    for state in folder.glob(f"{STATE}*"):
        shutil.rmtree(state, ignore_errors=True)


def _identity(context: Context, config: WholeNetwork) -> str:
    """What a training may only be continued with."""
    decisive = [config.model_dump(mode="json"), context.data, context.checkpoint, context.seed, context.digest]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]


def _numbers(about: About) -> Numbers:
    return {name: float(value) for name, value in about.items() if isinstance(value, int | float)}


@dataclass
class BestEpoch:
    """Keeps the network of the epoch with the highest accuracy on validation images, the later of equal ones: without
    such images, the last."""

    file: Path
    validation: Source
    context: Context
    classes: tuple[str, ...]
    highest: float | None = None
    """Accuracy of the network in the file, in per cent, once that was read or written."""

    def __call__(self, epoch: int, epochs: int, classifier: Classifier) -> None:
        """After an epoch; not after every one if there are many."""
        if epoch < epochs and epoch % -(-epochs // CHOICES):
            return
        found = self._accuracy(classifier) if len(self.validation) else 0.0
        if not distributed.is_main():
            return
        if self.highest is None and self.file.is_file():  # the training was resumed
            self.highest = _numbers(read_classifier(self.file)[1])["validation_top1"]
        if self.highest is None or found >= self.highest:
            self.highest = found
            save_classifier(self.model(classifier), self.file, {"epoch": epoch, "validation_top1": found})

    def model(self, classifier: Classifier) -> ImageClassifier:
        """The network under training as it is now."""
        head = classifier.heads[0]
        assert isinstance(head, nn.Linear)
        return ImageClassifier(classifier.backbone, head, self.classes)

    def _accuracy(self, classifier: Classifier) -> float:
        features, places = extract(classifier.backbone, self.validation, self.context.device, together=True)
        scores = classifier.scores(features)[0]
        classifier.heads.train()
        assert self.validation.labels is not None
        return top_accuracies(scores, self.validation.labels[places])["top1"]
