"""A trained backbone as a transformer of scikit-learn: from images to rows of features."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import BaseEstimator, TransformerMixin
from torch import Tensor

from tico_ssl.data.images import ImageLike, as_images
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import load_backbone
from tico_ssl.pipeline.workers import chosen_workers
from tico_ssl.results.run_folder import backbone_file
from tico_ssl.runtime.device import choose_device
from tico_ssl.runtime.errors import UserError

ONE_IMAGE = (str, Path, Image.Image)


class ImageEmbedder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Transforms images to the features of a backbone: a run folder, a backbone file, or a loaded backbone. There is
    nothing to fit. A pickle contains the path of a model, or the weights of a loaded one.

    `batch_size` images go through the network at once, on `device`, by default the GPU if there is one. With
    `normalise`, rows have length 1.
    """

    def __init__(
        self,
        model: str | Path | Backbone = "runs/demo",
        batch_size: int = 64,
        normalise: bool = False,
        device: str | None = None,
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.normalise = normalise
        self.device = device

    def fit(self, X: Any = None, y: Any = None) -> "ImageEmbedder":
        """Does nothing; there is nothing to learn."""
        self._backbone()
        return self

    def transform(self, X: Sequence[ImageLike] | ImageLike) -> NDArray[np.float32]:
        """One row of features per image: of paths, Pillow images, arrays (H, W, C) or tensors (C, H, W), also mixed, or
        of one array (N, H, W, C) or tensor (N, C, H, W)."""
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UserError(f"batch_size must be a positive number, got {self.batch_size!r}")
        backbone, images = self._backbone(), as_sequence(X)
        with torch.inference_mode():
            starts = range(0, len(images), self.batch_size)
            rows = [self._rows(backbone, images[start : start + self.batch_size]) for start in starts]
        return torch.cat(rows).numpy() if rows else np.empty((0, backbone.width), np.float32)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """feature_0, feature_1, ... as in a table of `tico embed`."""
        return np.array([f"feature_{number}" for number in range(self._backbone().width)], dtype=object)

    def _rows(self, backbone: Backbone, images: Sequence[Any]) -> Tensor:
        pixels = backbone.preprocess(_decoded(images, backbone)).to(next(backbone.parameters()))
        features = backbone(pixels.contiguous(memory_format=torch.channels_last)).float().cpu()
        return torch.nn.functional.normalize(features, dim=1) if self.normalise else features

    def _backbone(self) -> Backbone:
        device = choose_device() if self.device is None else torch.device(self.device)
        if isinstance(self.model, Backbone):
            return self.model.to(device).eval()
        file = backbone_file(self.model).resolve()
        return _loaded(file, file.stat().st_mtime_ns, device)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.no_validation = True  # of feature matrices: images are no such thing
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True  # paths
        tags.transformer_tags.preserves_dtype = []
        return tags


@functools.lru_cache(maxsize=2)
def _loaded(file: Path, changed: int, device: torch.device) -> Backbone:
    """The backbone of a file, shared by all clones: a cross-validation clones its steps for every fold."""
    return load_backbone(file).to(device).eval()


def _decoded(images: Any, backbone: Backbone) -> Any:
    """Images of a list as tensors, decoded side by side: Pillow lets other threads work."""
    if isinstance(images, Tensor | np.ndarray):
        return images
    one = functools.partial(as_images, channels=backbone.config.channels, limits=backbone.limits)
    with ThreadPoolExecutor(chosen_workers(None)) as threads:
        return [pixels for (pixels,) in threads.map(lambda image: one([image]), images)]


def as_sequence(images: Any) -> Any:
    """Images that can be sliced: a batch as it is, one image as a batch of one, a column of a table as a list."""
    if isinstance(images, ONE_IMAGE):
        return [images]
    if isinstance(images, Tensor):
        return images if images.ndim == 4 else images[None]
    if isinstance(images, np.ndarray) and images.dtype.kind not in "OSU":
        if images.ndim not in (3, 4):
            raise UserError(f"an array of shape {images.shape} holds no images: (H, W, C) or (N, H, W, C) is needed")
        return images if images.ndim == 4 else images[None]
    column = np.asarray(images, dtype=object) if hasattr(images, "to_numpy") else images
    if isinstance(column, np.ndarray):
        if column.ndim == 2 and column.shape[1] != 1:
            raise UserError(f"a table of shape {column.shape}: images are one column")
        return column.ravel().tolist()
    return list(images)
