"""Entry points of torch.hub: torch.hub.load("CLONE", "backbone", "runs/x", source="local")."""

import sys
from pathlib import Path
from typing import Any

dependencies = ["torch", "torchvision", "timm", "numpy", "PIL", "pydantic", "yaml", "rich", "safetensors"]

SOURCE = str(Path(__file__).resolve().parent / "src")
if SOURCE not in sys.path:  # stays there: parts of the package are imported when they are needed
    sys.path.insert(0, SOURCE)


def backbone(path: str, image_size: int | None = None) -> Any:
    """The trained backbone of a run folder or a .safetensors file, in evaluation mode: normalised images to features.
    Its `preprocess` makes network inputs from images of any kind."""
    from tico_ssl import load_backbone

    return load_backbone(path, image_size)


def tico_loss(**settings: Any) -> Any:
    """TiCo's loss as a module that keeps its covariance: loss(online, target) of embeddings (n, dim). Settings:
    dim=256, rho=8.0, beta=0.9, detach=False, source="online", check_finite=True."""
    from tico_ssl import TiCoLoss

    return TiCoLoss(**settings)
