"""What protocols cost, and so the order in which they run. Nothing here imports torch."""

from collections.abc import Iterable

from tico_ssl.config import catalogue
from tico_ssl.runtime.errors import UserError, suggestion

COSTS = ("features", "head", "network")
"""From cheap to dear: features, which are extracted once for all protocols, suffice; many more images pass through the
frozen backbone, or classifiers are trained on it for longer; all weights are trained."""
UNDECLARED = "head"


def cost_of(protocol: str) -> str:
    """The `COST` that a protocol declares, read without importing it."""
    cost = catalogue.declaration("evaluations", protocol, "COST", UNDECLARED)
    if cost not in COSTS:
        raise UserError(f"evaluation {protocol}: COST is one of {', '.join(COSTS)}{suggestion(str(cost), COSTS)}")
    return str(cost)


def cheap_first(protocols: Iterable[str]) -> list[str]:
    """By cost, and in the given order where it is the same."""
    return sorted(protocols, key=lambda protocol: COSTS.index(cost_of(protocol)))
