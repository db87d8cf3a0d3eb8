"""95 % intervals that a line of results.jsonl may hold beside its numbers.

"intervals":   {representation: {metric: [low, high]}}    of the metric, in its own unit
"differences": {reference: {metric: [low, high]}}         of trained minus that reference
"""

import math
from collections.abc import Mapping
from typing import Any

from tico_ssl.results.confidence import Interval
from tico_ssl.results.record import Line, is_number

INTERVALS, DIFFERENCES = "intervals", "differences"


def interval(line: Line, representation: str, metric: str) -> Interval | None:
    """The interval of a metric under one representation; None where the line has none."""
    return _pair(line.get(INTERVALS), representation, metric)


def difference_interval(line: Line, reference: str, metric: str) -> Interval | None:
    """The interval of trained minus a reference, paired by test images; None where the line has none."""
    return _pair(line.get(DIFFERENCES), reference, metric)


def _pair(stored: Any, column: str, metric: str) -> Interval | None:
    """Two finite numbers in order; whatever else a damaged line may hold counts as none."""
    by_metric = stored.get(column) if isinstance(stored, Mapping) else None
    found = by_metric.get(metric) if isinstance(by_metric, Mapping) else None
    if not isinstance(found, list | tuple) or len(found) != 2 or not all(map(is_number, found)):
        return None
    low, high = map(float, found)
    return (low, high) if math.isfinite(low) and math.isfinite(high) and low <= high else None
