"""Fine-tuning of a copy of a backbone with a classifier, and its accuracy on the test images."""

import copy
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from tico_ssl.config.views import shorter_side
from tico_ssl.evaluations._classification.settings import FineTuning
from tico_ssl.evaluations._classification.training import Job, classes_of, train_classifier
from tico_ssl.evaluations._context import Context
from tico_ssl.features.extraction import extract
from tico_ssl.features.scores import top_accuracies
from tico_ssl.networks.backbones import Backbone
from tico_ssl.results.record import Numbers


def fine_tuned(
    context: Context,
    settings: FineTuning,
    name: str,
    title: str,
    place: Path | None,
    subset: Tensor | None = None,
    keep: Callable[[Backbone, nn.Module], None] | None = None,
) -> Numbers:
    """Fine-tune a backbone on some of the training images (None: all), and test it. `keep` gets the trained modules."""
    backbone = copy.deepcopy(context.backbones[name]).requires_grad_(True)
    images = context.training_images(shorter_side([settings.policy()], backbone.image_size))
    images = images if subset is None else images.subset(subset)
    checkpoint = None if place is None else place.with_name(f"{place.name}.pt")
    classes, bad = classes_of(context.train, context.test), context.unread.train
    job = Job(title, images, classes, settings, context.device, checkpoint, bad=bad)
    classifier = train_classifier(job, backbone, [settings.lr_head], settings.lr_backbone)
    if keep is not None:
        keep(classifier.backbone, classifier.heads[0])
    _, test = context.images(name)
    tested, places = extract(classifier.backbone, test, context.device, together=True)
    context.unread.note("test", test, places)
    assert test.labels is not None
    return top_accuracies(classifier.scores(tested)[0], test.labels[places])
