"""One file per protocol; the file name is the name on the command line. Out of tree: a dotted import path.

A protocol has `Config`, a Section with its settings, `METRICS`, which describes its metrics (see `Metric`), and
`run(context, config) -> Result`. Every metric of a trained backbone is reported beside that of an untrained one (and of
raw pixels, where images are small), to answer "did pretraining help?". Without METRICS, values are shown as they are
and give no verdict.

A protocol that needs other data than labelled images has its own `open_context(run, data)`, which creates the context
of its `run` (see `detection`). If the data do not allow a protocol, `run` raises a UserError. Optional:

- `COST`: `"features"`, `"head"` (the default) or `"network"` (see `_cost`); `all` runs cheap ones first.
- `work(context, config) -> Work`: images that pass through networks, for an estimate of the time (see `fine_tune`).
- `NOT_IN_ALL`: why `all` leaves the protocol out.
"""

from typing import TYPE_CHECKING

from tico_ssl.config.section import Section
from tico_ssl.results.metrics import TOP1, TOP5, Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.evaluations._context import Context
    from tico_ssl.evaluations._estimate import Work
    from tico_ssl.evaluations._evaluate import evaluate, evaluate_all
    from tico_ssl.features.evidence import accuracies
    from tico_ssl.features.frozen import Features

__all__ = [
    "TOP1",
    "TOP5",
    "Context",
    "Features",
    "Metric",
    "Numbers",
    "Result",
    "Section",
    "Work",
    "accuracies",
    "evaluate",
    "evaluate_all",
]
__getattr__ = lazy.attributes(
    __name__,
    dict.fromkeys(("Context", "Features", "accuracies"), "_context")
    | {"Work": "_estimate"}
    | dict.fromkeys(("evaluate", "evaluate_all"), "_evaluate"),
)
