"""One file per self-supervised method; the file name is the name in a recipe.

A method file defines `Config`, a `MethodConfig` with its settings, and `build(config, backbone) -> Method`.
"""

from typing import TYPE_CHECKING

from tico_ssl.config.section import MethodConfig
from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.methods._base import Batch, Encoded, Method, StepOutput
    from tico_ssl.methods._siamese import Siamese, head

__all__ = ["Batch", "Encoded", "Method", "MethodConfig", "Siamese", "StepOutput", "head"]
__getattr__ = lazy.attributes(
    __name__,
    dict.fromkeys(("Batch", "Encoded", "Method", "StepOutput"), "_base")
    | dict.fromkeys(("Siamese", "head"), "_siamese"),
)
