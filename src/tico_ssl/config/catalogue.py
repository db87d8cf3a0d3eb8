"""Catalogues are folders: every module in `methods/`, `evaluations/` or `exporting/` is an entry under its file name.

Outside this package, a dotted import path is a name too: `my_lab.methods.better_tico`.
"""

import importlib
import pkgutil
from types import ModuleType

from tico_ssl.runtime.errors import UserError, suggestion

KINDS = {"methods": "method", "evaluations": "evaluation", "exporting": "export format"}

PARTS = {"methods": ("Config", "build"), "evaluations": ("Config", "run"), "exporting": ("write",)}


def entries(kind: str) -> list[str]:
    """The names that `tico list` shows: file names, with hyphens for underscores."""
    package = importlib.import_module(f"tico_ssl.{kind}")
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_")


def load(kind: str, name: str) -> ModuleType:
    """The module behind a name."""
    if name in entries(kind):
        return importlib.import_module(f"tico_ssl.{kind}.{name.replace('-', '_')}")
    if "." in name:
        try:
            module = importlib.import_module(name)
        except (ImportError, TypeError, ValueError, SyntaxError) as error:
            raise UserError(f"{KINDS[kind]} '{name}' cannot be imported: {error}") from error
        for part in PARTS[kind]:
            if not hasattr(module, part):
                raise UserError(f"'{name}' is no {KINDS[kind]}: it has no '{part}'")
        return module
    raise UserError(f"no {KINDS[kind]} is called '{name}'{suggestion(name, entries(kind))}")


def summary(module: ModuleType) -> str:
    """The first line of a module's docstring, which is its entry in a listing."""
    return (module.__doc__ or "").strip().splitlines()[0] if module.__doc__ else ""
