"""What `training.init` may be, as far as that can be told without torch."""

from pathlib import Path

from tico_ssl.config.sections import BACKBONE_LIBRARIES
from tico_ssl.runtime.errors import UserError


def require_initial(source: str) -> bool:
    """Require a file, a folder or the name of a model; whether it is the latter. A path wins over a name."""
    path = Path(source).expanduser()
    if path.exists():
        if not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise UserError(f"training.init '{source}' is neither a regular file nor a folder")
        return False
    library, _, model = source.partition("/")
    if library in BACKBONE_LIBRARIES and library != "tico" and model:
        return True
    raise UserError(
        f"training.init '{source}' is neither a file, nor a run folder, nor the name of a model with public weights, "
        "such as torchvision/resnet50 or timm/vit_small_patch16_224.augreg_in21k"
    )
