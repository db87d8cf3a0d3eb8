"""A classifier on disk: one safetensors file with backbone, head and, as metadata, how to rebuild and to use them."""

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tico_ssl.classifying.model import ImageClassifier
from tico_ssl.classifying.place import classifier_file
from tico_ssl.config.section import validate
from tico_ssl.networks.storage import Description, described, plain_state, read_described, rebuilt, write_described
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

BACKBONE, HEAD = "backbone.", "head."  # beginnings of the tensors' names
About = dict[str, str | float | None]
"""Where a classifier comes from, in words and numbers."""
REMEDY = "`tico finetune` makes it again"


class ClassifierDescription(Description):
    """How to rebuild a classifier: the metadata of its file, which may come from anyone."""

    classes: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    about: About


def save_classifier(model: ImageClassifier, path: Path, about: About) -> None:
    """Write the file atomically, with a checksum of every tensor. `about` says where the classifier comes from."""
    state = {f"{BACKBONE}{name}": value for name, value in plain_state(model.backbone).items()}
    state |= {f"{HEAD}{name}": value.detach().cpu().contiguous() for name, value in model.head.state_dict().items()}
    write_described(path, state, described(model.backbone) | {"classes": list(model.classes), "about": about})


def load_classifier(path: str | Path) -> ImageClassifier:
    """The classifier of `path`, a folder that `tico finetune` has written or its file, in evaluation mode.

    Images are paths, Pillow images, arrays or tensors.

        model = load_classifier("runs/mine/classifier")
        model.predict(["a.jpg"], top=3)  # [[("daisy", 0.98), ("rose", 0.01), ("tulip", 0.005)]]
    """
    return read_classifier(classifier_file(path))[0]


def read_classifier(file: Path) -> tuple[ImageClassifier, About]:
    """A classifier, and what its file says about it."""
    state, description = read_described(file, REMEDY)
    if "classes" not in description:
        raise UserError(f"{file}: a backbone without a classifier; `tico finetune` makes one of it")
    known = validate(ClassifierDescription, description, f"{file}: metadata")
    backbone = rebuilt(file, known, _under(BACKBONE, state))
    head = _head(_under(HEAD, state), backbone.width, len(known.classes))
    if head is None or len(state) != len(_under(BACKBONE, state)) + 2:
        raise UserError(f"{file}: its weights do not match its own metadata, {counted(len(known.classes), 'class')}")
    return ImageClassifier(backbone, head, known.classes).eval(), known.about


def _under(beginning: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(beginning): value for name, value in state.items() if name.startswith(beginning)}


def _head(state: dict[str, Any], width: int, classes: int) -> nn.Linear | None:
    """The linear layer of these tensors; None if they are not those of one."""
    with torch.device("meta"):
        head = nn.Linear(width, classes)
    wanted = head.state_dict()
    if wanted.keys() != state.keys() or any(wanted[name].shape != value.shape for name, value in state.items()):
        return None
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)
