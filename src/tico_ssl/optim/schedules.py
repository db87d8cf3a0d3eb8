"""Values that change during training, as pure functions of the step: no state, so resuming needs none.

Nothing here imports torch: settings of evaluations are read without it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def scaled_lr(base_lr: float, batch_size: int) -> float:
    """Linear scaling rule: the base learning rate is for a batch of 256."""
    return base_lr * batch_size / 256


def warmup_cosine(step: int, total: int, warmup: int, peak: float, end: float, start: float = 0.0) -> float:
    """Linear from `start` at step 0 to the peak at step `warmup`, then half a cosine that reaches `end` at step
    `total`."""
    if step >= total:
        return end
    if step < warmup:
        return linear_warmup(step, warmup, peak, start)
    return end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def warmup_steps(
    step: int, total: int, warmup: int, peak: float, decay_at: Sequence[float], decay: float, start: float = 0.0
) -> float:
    """Linear from `start` at step 0 to the peak at step `warmup`, then multiplied by `decay` at every fraction of
    `total` in `decay_at`."""
    if step < warmup:
        return linear_warmup(step, warmup, peak, start)
    return peak * step_decay(step, total, decay_at, decay)


def linear_warmup(step: int, warmup: int, peak: float, start: float) -> float:
    """Linear from `start` at step 0 to the peak at step `warmup`."""
    return start + (peak - start) * step / warmup


def step_decay(step: int, total: int, decay_at: Sequence[float], decay: float) -> float:
    """`decay` to the power of how many of the fractions `decay_at` of `total` are reached."""
    return decay ** sum(step >= round(share * total) for share in decay_at)


def cosine_ema_decay(progress: "float | Tensor", start: float, end: float = 1.0) -> "float | Tensor":
    """BYOL's cosine schedule of the EMA decay: `start` at progress 0, `end` at 1."""
    angle = progress * math.pi
    cosine = math.cos(angle) if isinstance(angle, float | int) else angle.cos()
    return end - (end - start) * (cosine + 1) / 2
