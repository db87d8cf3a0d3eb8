"""A view's random transformations as data: which operations, how likely, how strong."""

import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from tico_ssl.config.section import Section
from tico_ssl.runtime.errors import UserError, suggestion

Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Range = Annotated[tuple[float, float], Field(strict=False)]


class ViewPolicy(Section):
    """One view, in the order of BYOL: crop, flip, (jigsaw,) colour jitter, greyscale, blur, solarise, normalise."""

    count: Annotated[int, Field(ge=1)] = 1
    """How many views are drawn with this policy."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Pixels of the square view; by default the recipe's data.image_size."""
    relative_size: Annotated[float, Field(gt=0, le=4)] | None = None
    """Instead of size: the view's side as a share of data.image_size, which then stays free to change."""
    crop_scale: Range = (0.08, 1.0)
    """Share of the image's area that a crop keeps."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Width over height of a crop."""
    flip: Probability = 0.5
    """Mirror left and right."""
    jigsaw: Annotated[int, Field(ge=0, le=8)] = 0
    """Cut the view into so many rows and columns of pieces, in random order (PIRL: 3); 0: leave it whole."""
    jitter: Probability = 0.8
    """Change brightness, contrast, saturation and hue, in an order drawn for every image."""
    brightness: Strength = 0.4
    """Factor within 1 plus or minus this."""
    contrast: Strength = 0.4
    """Factor within 1 plus or minus this, about the mean grey."""
    saturation: Strength = 0.2
    """Factor within 1 plus or minus this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Shift within plus or minus this share of the colour circle."""
    greyscale: Probability = 0.2
    """Take the colours away."""
    greyscale_first: bool = False
    """Take the colours away before the jitter (MoCo v1), not after it."""
    blur: Probability = 0.0
    """Gaussian blur with a kernel of a tenth of the view."""
    blur_sigma: Range = (0.1, 2.0)
    """Its standard deviation in pixels."""
    solarise: Probability = 0.0
    """Invert every value of at least one half."""

    @model_validator(mode="after")
    def _ranges(self) -> "ViewPolicy":
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must rise within (0, 1], got {list(self.crop_scale)}")
        for name in ("crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must rise and be positive, got {[low, high]}")
        if self.size is not None and self.relative_size is not None:
            raise ValueError("size and relative_size say the same thing twice; give one of them")
        return self

    def side(self, image_size: int) -> int:
        """Pixels of the square that a crop is resized to."""
        if self.relative_size is not None:
            return max(1, round(self.relative_size * image_size))
        return self.size or image_size


def shorter_side(policies: Sequence[ViewPolicy], image_size: int) -> int:
    """Pixels that an image needs along its shorter side, so that even the smallest crop has as many as its view."""
    return max(math.ceil(policy.side(image_size) / math.sqrt(policy.crop_scale[0])) for policy in policies)


def packaged_policies() -> list[str]:
    """The names of the policies that come with the package."""
    folder = resources.files("tico_ssl") / "recipes" / "views"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def named_policy(name: str) -> list[dict[str, Any]]:
    """The views of a packaged policy, as a recipe would write them out."""
    if name not in packaged_policies():
        raise UserError(f"views: no policy is called '{name}'{suggestion(name, packaged_policies())}")
    views: list[dict[str, Any]] = yaml.safe_load(_policy_text(name))
    return views


def policy_summary(name: str) -> str:
    """The first line of a policy's head comment, for a listing."""
    return _policy_text(name).splitlines()[0].lstrip("# ").rstrip(".")


def _policy_text(name: str) -> str:
    return (resources.files("tico_ssl") / "recipes" / "views" / f"{name}.yaml").read_text(encoding="utf-8")
