"""Values that change during training, as pure functions of the step: no state, so resuming needs none.

Nothing here imports torch: settings of evaluations are read without it.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def scaled_lr(base_lr: float, batch_size: int) -> float:
    """Linear scaling rule: the base learning rate is for a batch of 256."""
    return base_lr * batch_size / 256


def warmup_cosine(step: int, total: int, warmup: int, peak: float, end: float) -> float:
    """Linear from 0 at step 0 to the peak at step `warmup`, then half a cosine that reaches `end` at step `total`."""
    if step >= total:
        return end
    if step < warmup:
        return peak * step / warmup
    return end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def cosine_ema_decay(progress: "float | Tensor", start: float, end: float = 1.0) -> "float | Tensor":
    """BYOL's cosine schedule of the EMA decay: `start` at progress 0, `end` at 1."""
    angle = progress * math.pi
    cosine = math.cos(angle) if isinstance(angle, float | int) else angle.cos()
    return end - (end - start) * (cosine + 1) / 2
