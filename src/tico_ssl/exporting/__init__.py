"""One file per format; the file name is the name on the command line.

A format has `write(backbone, out) -> str`, which writes the file and returns a snippet of Python that uses it. It may
declare `OUT`, the usual name of its file; `NEEDS`, the optional libraries without which it cannot be written; and
`OPTIONS`, what its `write` takes besides: `preprocessing`, and `origin`, where the weights come from.
"""

from typing import TYPE_CHECKING

from tico_ssl.runtime import lazy

if TYPE_CHECKING:
    from tico_ssl.exporting._writing import export

__all__ = ["export"]
__getattr__ = lazy.attributes(__name__, {"export": "_writing"})
