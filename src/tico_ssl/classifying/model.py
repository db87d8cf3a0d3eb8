"""A backbone with a linear classifier on its features: from images to classes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tico_ssl.classifying.tables import require_top
from tico_ssl.data.images import ImageLike
from tico_ssl.networks.backbones import Backbone
from tico_ssl.runtime.errors import UserError

BATCH = 256  # images that `predict` gives to the network at once
DIGITS = 9  # significant ones, that determine a float32


class ImageClassifier(nn.Module):
    """Normalised images to logits, a column per class."""

    def __init__(self, backbone: Backbone, head: nn.Linear, classes: Sequence[str]) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.classes = tuple(classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes) of normalised images, as `preprocess` makes them."""
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def preprocess(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Network input (N, C, size, size) from paths, Pillow images, arrays or tensors of any size, one or many."""
        return self.backbone.preprocess(images)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities (N, classes) of normalised images, on the CPU."""
        ready = images.to(self.head.weight.device).contiguous(memory_format=torch.channels_last)
        found = self.forward(ready).float().softmax(dim=1).cpu()
        if not found.isfinite().all():
            raise UserError("the classifier gives probabilities that are not finite: its weights cannot be used")
        return found

    def predict(self, images: ImageLike | Sequence[ImageLike], top: int = 5) -> list[list[tuple[str, float]]]:
        """The likeliest classes of each image with their probabilities, in falling order."""
        require_top(top)
        return [
            [(self.classes[number], probability) for number, probability in ranking]
            for part in self.preprocess(images).split(BATCH)
            for ranking in rankings(self.probabilities(part), top)
        ]


def rankings(probabilities: Tensor, top: int) -> list[list[tuple[int, float]]]:
    """The likeliest classes of each row, by number, with their probabilities."""
    best = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
    return [
        [(number, float(f"{value:.{DIGITS}g}")) for number, value in zip(numbers, values, strict=True)]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
