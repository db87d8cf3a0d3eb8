"""Signs of collapse."""

import math
from collections.abc import Mapping


def collapse_signs(values: Mapping[str, float], collapsed_loss: float | None) -> dict[str, str]:
    """Warnings by metric; empty for a healthy run. The thresholds are meant for the time after warm-up."""
    signs = {}
    advice = "lower optimizer.lr, lengthen optimizer.warmup_epochs, or lower optimizer.one_dimensional_lr_ratio"
    if collapsed_loss is not None and collapsed_loss > 1 and values["loss"] > 0.8 * collapsed_loss:
        signs["loss"] = f"the loss is {values['loss']:.2f}, and {collapsed_loss:g} means total collapse; {advice}"
    if values.get("mean_cosine", 0.0) > 0.7:
        signs["mean_cosine"] = f"different images have cosine {values['mean_cosine']:.2f} on average; {advice}"
    if values.get("embedding_rank", math.inf) < 3:
        rank = values["embedding_rank"]
        signs["embedding_rank"] = f"embeddings have effective rank {rank:.1f}; {advice}"
    if values.get("largest_eigenvalue", 0.0) > 0.5:
        share = values["largest_eigenvalue"]
        signs["largest_eigenvalue"] = f"one direction holds {share:.0%} of the variance; {advice}"
    return signs
