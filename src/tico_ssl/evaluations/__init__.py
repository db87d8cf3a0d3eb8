"""One file per protocol; the file name is the name on the command line, and a dotted import path is one elsewhere.

A protocol has `Config`, a Section with its settings, `METRICS`, what its numbers mean (see `Metric`), and
`run(context, config) -> Result`. Every number of a trained backbone stands beside the same number of an untrained one
(and of raw pixels, where images are small), so that "did pretraining help?" is answered. Without METRICS its numbers
are shown as they are, and do not answer that.

A protocol that needs other data than labelled images has its own `open_context(run, data)`, which makes what its `run`
gets as context (see `detection`). `NOT_IN_ALL`, where a protocol has it, says why `tico evaluate RUN all` leaves it
out; what the data do not allow, `run` says itself, by a UserError.
"""

from typing import TYPE_CHECKING

from tico_ssl.config.section import Section
from tico_ssl.results.metrics import TOP1, TOP5, Metric
from tico_ssl.results.record import Numbers, Result
from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.evaluations._context import Context
    from tico_ssl.evaluations._evaluate import evaluate, evaluate_all
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
    "evaluate",
    "evaluate_all",
]
__getattr__ = lazy.attributes(
    __name__,
    dict.fromkeys(("Context", "Features"), "_context") | dict.fromkeys(("evaluate", "evaluate_all"), "_evaluate"),
)
