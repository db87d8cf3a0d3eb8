"""Images whose features are extracted again and again while training goes on: prepared once, then kept on the GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tico_ssl.data.source import Source
from tico_ssl.features.extraction import image_batches, input_of
from tico_ssl.networks.backbones import Backbone

SHARE = 8  # of the GPU's free memory, an eighth may be taken: training needs the rest


class KeptBatches:
    """In place of `image_batches` for one source: the same batches at every call, so features do not depend on whether
    they were kept. Images in memory are prepared faster than they would be kept, and a CPU has the network to wait
    for, not the images; neither is kept."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, list[int]]] = []
        self._input: object = None

    def __call__(
        self, source: Source, backbone: Backbone, device: torch.device, whole: bool = False
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Batches as `image_batches` makes them."""
        wanted = (*input_of(backbone), whole)
        if self._input == wanted:
            yield from self._kept
            return
        made = image_batches(source, backbone, device, whole)
        if source.images is not None or _size(source, backbone) > room(device):
            yield from made
            return
        kept = []
        for images, places in made:
            kept.append((images.clone(), places))
            yield images, places
        self._kept, self._input = kept, wanted


def _size(source: Source, backbone: Backbone) -> int:
    """Bytes of all images, prepared."""
    pixels = backbone.config.channels * backbone.image_size**2
    return len(source) * pixels * next(backbone.parameters()).element_size()


def room(device: torch.device) -> int:
    """Bytes that may be kept."""
    return torch.cuda.mem_get_info(device)[0] // SHARE if device.type == "cuda" else 0
