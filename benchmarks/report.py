"""CPU seconds of the parts of a report; CPU time does not depend on other load on the machine.

    OMP_NUM_THREADS=1 python benchmarks/report.py RUN >> benchmarks/logs/development/report.jsonl

RUN should have 10,000 images in its two splits, and no folder `features`, a cache that would be used.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tico_ssl import report as package
from tico_ssl.features import exploration
from tico_ssl.features.cache import FeatureCache
from tico_ssl.report import image_sections, static
from tico_ssl.results.run_folder import environment

seconds: dict[str, float] = {"imports": time.process_time()}  # since the start of the process


def timed(owner: Any, name: str, part: str) -> None:
    """Add the time of a function to a part."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            seconds[part] = seconds.get(part, 0.0) + time.process_time() - start

    setattr(owner, name, wrapper)


timed(FeatureCache, "extract", "embedding")
timed(exploration, "project", "map")
timed(exploration, "thumbnails", "thumbnails")
timed(image_sections, "build_atlas", "atlas")
timed(static, "save", "figures for papers")
path = package.report(sys.argv[1])
rounded = {part: round(value, 2) for part, value in seconds.items()}
total, size = round(time.process_time(), 2), round(path.stat().st_size / 2**20, 2)
print(json.dumps({"total_seconds": total, "seconds": rounded, "mebibytes": size, **environment()}))
