"""Catalogues are folders: every module in `methods/`, `evaluations/`, `exporting/` or `data/formats/` is an entry under
its file name, except those whose name begins with an underscore. Outside this package a dotted import path is a name
too: `my_lab.methods.better_tico`.

What an entry declares - its settings, its metrics, its first line - can be read without importing it: of the module's
statements only those are executed that the declaration depends on. So a recipe is checked, described and listed before
torch is imported, and a method stays one file.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tico_ssl.runtime.errors import UserError, suggestion

PACKAGE = Path(__file__).parents[1]

# kind: what one of its entries is called, and what each of them must have
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "methods": ("method", ("Config", "build")),
    "evaluations": ("evaluation", ("Config", "run")),
    "exporting": ("export format", ("write",)),
    "data/formats": ("data format", ("matches", "open")),
}


def entries(kind: str) -> list[str]:
    """The names that `tico list` shows: file names, with hyphens for underscores."""
    files = PACKAGE.joinpath(*kind.split("/")).glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if not file.stem.startswith("_"))


def require(kind: str, name: str) -> None:
    """Refuse a name that no entry has. One elsewhere is believed until it is loaded."""
    _module_name(kind, name)


def load(kind: str, name: str) -> ModuleType:
    """The module behind a name."""
    module_name = _module_name(kind, name)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError, SyntaxError) as error:
        if module_name != name:
            raise  # a module of this package: a missing library, or a mistake of ours
        raise UserError(f"{KINDS[kind][0]} '{name}' cannot be imported: {error}") from error
    for part in KINDS[kind][1]:
        if not hasattr(module, part):
            raise _missing(kind, name, part)
    return module


def declaration(kind: str, name: str, part: str, default: Any = ...) -> Any:
    """What a module binds to a name at its top level, without importing the module unless that is already done.

    Without a default, an entry that does not declare it is refused.
    """
    module_name = _module_name(kind, name)
    module = sys.modules.get(module_name)
    file = None if module else _file(module_name)
    if module is None and file is None:
        module = load(kind, name)  # no Python file to read, or one that cannot be found: the import says so
    try:
        found = getattr(module, part, ...) if file is None else _read(file, module_name, part)
    except Exception:  # whatever is wrong with a module, importing it says so
        found = getattr(load(kind, name), part, ...)
    if found is ... and default is ...:
        raise _missing(kind, name, part)
    return default if found is ... else found


def summary(kind: str, name: str) -> str:
    """The first line of a module's docstring, which is its entry in a listing."""
    file = _file(_module_name(kind, name))
    text = ast.get_docstring(_parsed(file)) if file else load(kind, name).__doc__
    return (text or "").strip().partition("\n")[0]


def _module_name(kind: str, name: str) -> str:
    if name in entries(kind):
        return f"tico_ssl.{kind.replace('/', '.')}.{name.replace('-', '_')}"
    if "." in name:
        return name
    raise UserError(f"no {KINDS[kind][0]} is called '{name}'{suggestion(name, entries(kind))}")


def _missing(kind: str, name: str, part: str) -> UserError:
    return UserError(f"'{name}' is no {KINDS[kind][0]}: it has no '{part}'")


def _file(module_name: str) -> Path | None:
    """The source of a module. Packages around it are imported, it is not."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, TypeError, ValueError, SyntaxError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@functools.cache
def _read(file: Path, module_name: str, part: str) -> Any:
    """The value of a name, from the statements of a module that it depends on; `...` where nothing binds it."""
    body = _parsed(file).body
    binding = {name: statement for statement in body for name in _bound(statement)}
    if part not in binding:
        return ...
    names: set[str] = set()
    open_names = [part]
    while open_names:
        name = open_names.pop()
        if name in binding and name not in names:
            names.add(name)
            read = (node for node in ast.walk(binding[name]) if isinstance(node, ast.Name))
            open_names += [node.id for node in read if isinstance(node.ctx, ast.Load)]  # a field may have any name
    needed = {binding[name] for name in names}
    chosen = ast.Module([_reduced(statement, names) for statement in body if statement in needed], type_ignores=[])
    namespace: dict[str, Any] = {"__name__": module_name, "__file__": str(file)}
    exec(compile(chosen, str(file), "exec"), namespace)
    return namespace[part]


def _reduced(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """A statement as it is; of an import, only what is needed: the rest may want torch."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return statement
    reduced = copy.copy(statement)
    reduced.names = [alias for alias in statement.names if _bound_by(alias) in names]
    return reduced


def _bound_by(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a value to."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from map(_bound_by, statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
