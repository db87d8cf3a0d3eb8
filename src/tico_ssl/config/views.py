"""A view's random transformations as data: which operations, how likely, how strong."""

import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from tico_ssl.config.section import Section
from tico_ssl.runtime.errors import UserError, suggestion

USUAL_SIDE = 256  # pixels of an image's shorter side, of which evaluations usually take the central 224
SMALL_IMAGE = 64  # pixels, of the largest images that evaluations and measurements treat as they do CIFAR's
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Range = Annotated[tuple[float, float], Field(strict=False)]
CropSampling = Literal["clipped", "rejection", "distorted"]
Interpolation = Literal["bicubic", "bilinear"]


class ViewPolicy(Section):
    """One view, in the order of BYOL: crop, flip, (jigsaw,) colour jitter, greyscale, blur, solarise, normalise."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of views with this policy."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Side of the square view in pixels; default: data.image_size."""
    relative_size: Annotated[float, Field(gt=0, le=4)] | None = None
    """Instead of size: side of the view as a fraction of data.image_size."""
    crop_scale: Range = (0.08, 1.0)
    """Range of a crop's area, as a fraction of the image."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Range of a crop's aspect ratio, width over height."""
    crop_sampling: CropSampling = "clipped"
    """How a crop is drawn. clipped (BYOL): one draw, uniform in area and log ratio, cut off where it exceeds the image.
    rejection (torchvision's RandomResizedCrop): the first of ten such draws that fits. distorted (SimCLR, TensorFlow's
    sample_distorted_bounding_box): the first draw, uniform in height and ratio, that fits and is at least a tenth of
    the image."""
    interpolation: Interpolation = "bicubic"
    """Interpolation that resizes a crop to the view, antialiased."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    jigsaw: Annotated[int, Field(ge=0, le=8)] = 0
    """Rows and columns of a jigsaw puzzle, its pieces in random order (PIRL: 3); 0: no jigsaw."""
    jitter: Probability = 0.8
    """Probability of jittering brightness, contrast, saturation and hue, in a random order per image."""
    brightness: Strength = 0.4
    """Factor within 1 ± this."""
    contrast: Strength = 0.4
    """Factor within 1 ± this, about the mean grey."""
    saturation: Strength = 0.2
    """Factor within 1 ± this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Shift within ± this fraction of the colour circle."""
    greyscale: Probability = 0.2
    """Probability of a conversion to greyscale."""
    greyscale_first: bool = False
    """Convert to greyscale before the jitter (MoCo v1), not after it."""
    blur: Probability = 0.0
    """Probability of a Gaussian blur."""
    blur_sigma: Range = (0.1, 2.0)
    """Range of the blur's standard deviation, in pixels."""
    blur_kernel: Literal["tenth", "full"] = "tenth"
    """Width of the blur's kernel. tenth (SimCLR, BYOL): a tenth of the view, which hardly blurs small ones: 3 pixels of
    32, 1 of 14. full (as Pillow's filter, in most PyTorch code): four of the largest standard deviations to each side.
    """
    solarise: Probability = 0.0
    """Probability of solarisation: values of at least 0.5 are inverted."""

    @model_validator(mode="after")
    def _ranges(self) -> "ViewPolicy":
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must satisfy 0 < low <= high <= 1, got {list(self.crop_scale)}")
        for name in ("crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must satisfy 0 < low <= high, got {[low, high]}")
        if self.size is not None and self.relative_size is not None:
            raise ValueError("size and relative_size exclude each other; give one of them")
        return self

    def side(self, image_size: int) -> int:
        """Side in pixels that a crop is resized to."""
        if self.relative_size is not None:
            return max(1, round(self.relative_size * image_size))
        return self.size or image_size


def shorter_side(policies: Sequence[ViewPolicy], image_size: int) -> int:
    """Length of an image's shorter side, in pixels, at which even the smallest crop has the resolution of its view."""
    return max(math.ceil(policy.side(image_size) / math.sqrt(policy.crop_scale[0])) for policy in policies)


def packaged_policies() -> list[str]:
    """The names of the policies that come with the package."""
    folder = resources.files("tico_ssl") / "recipes" / "views"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def named_policy(name: str) -> list[dict[str, Any]]:
    """The views of a packaged policy, as a recipe spells them out."""
    if name not in packaged_policies():
        raise UserError(f"views: no policy is called '{name}'{suggestion(name, packaged_policies())}")
    views: list[dict[str, Any]] = yaml.safe_load(_policy_text(name))
    return views


def policy_summary(name: str) -> str:
    """The first line of a policy's head comment, for a listing."""
    return _policy_text(name).splitlines()[0].lstrip("# ").rstrip(".")


def _policy_text(name: str) -> str:
    return (resources.files("tico_ssl") / "recipes" / "views" / f"{name}.yaml").read_text(encoding="utf-8")
