"""One file per protocol; the file name is the name on the command line.

A protocol has `Config`, a Section with its settings, and `run(context, config) -> Result`. Every number of a trained
backbone stands beside the same number of an untrained one (and of raw pixels, where images are small), so that "did
pretraining help?" is answered.

A protocol that needs other data than labelled images has its own `open_context(run, data)`, which makes what its `run`
gets as context (see `detection`). `NOT_IN_ALL`, where a protocol has it, says why `tico evaluate RUN all` leaves it
out; what the data do not allow, `run` says itself, by a UserError.
"""

from typing import TYPE_CHECKING

from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.evaluations._context import Context
    from tico_ssl.evaluations._evaluate import evaluate, evaluate_all

__all__ = ["Context", "evaluate", "evaluate_all"]
__getattr__ = lazy.attributes(__name__, {"Context": "_context", "evaluate": "_evaluate", "evaluate_all": "_evaluate"})
