"""One result of an evaluation, as results.jsonl keeps it."""

from dataclasses import dataclass
from typing import Any

Numbers = dict[str, float]


@dataclass(frozen=True)
class Result:
    """One line of results.jsonl: numbers with everything that they depend on."""

    protocol: str
    settings: dict[str, Any]
    data: dict[str, Any]
    checkpoint: str
    seed: int
    numbers: dict[str, Numbers]
    seconds: float
