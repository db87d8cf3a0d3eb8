"""Settings shared by the protocols that measure representations, and their tables. Nothing here imports torch."""

from typing import Annotated

from pydantic import Field

from tico_ssl.config.section import Section


class ViewSettings(Section):
    """Which images, and which views of them."""

    images: Annotated[int, Field(ge=2)] = 1_000
    """Training images, at most, spread evenly."""
    policy: str | None = None
    """A packaged policy (`tico list views`); by default the views of the run's recipe, or BYOL's without a run."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the views."""


SEVERITIES = (1, 2, 3, 4, 5)
SIZES = (32, 64, 224)  # pixels, for which severities are defined

# Strength of each corruption at severity 1 to 5, for each size.
STRENGTHS: dict[str, tuple[tuple[float, ...], ...]] = {
    "gaussian-noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.04, 0.08, 0.12, 0.15, 0.18), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot-noise": ((500, 250, 100, 75, 50), (250, 100, 50, 30, 15), (60, 25, 12, 5, 3)),
    "impulse-noise": ((0.01, 0.02, 0.03, 0.05, 0.07), (0.01, 0.02, 0.05, 0.08, 0.14), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "gaussian-blur": ((0.4, 0.6, 0.7, 0.8, 1), (0.5, 0.75, 1, 1.25, 1.5), (1, 2, 3, 4, 6)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "jpeg": ((80, 65, 58, 50, 40), (65, 58, 50, 40, 25), (25, 18, 15, 10, 7)),
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65), (0.9, 0.8, 0.7, 0.6, 0.5), (0.6, 0.5, 0.4, 0.3, 0.25)),
}
