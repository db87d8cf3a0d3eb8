"""Catalogues are folders: every module in `methods/`, `evaluations/`, `exporting/` or `data/formats/` is an entry under
its file name, except those whose name begins with an underscore. Outside this package a dotted import path is a name
too: `my_lab.methods.better_tico`.

What an entry declares (its settings, its metrics, its first line) can be read without importing it: only the
module's statements that the declaration depends on are executed. So a recipe is checked, described and listed before
torch is imported, and a method stays one file.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.printing import printable
from tico_ssl.runtime.progress import is_main

PACKAGE = Path(__file__).parents[1]

# kind: what an entry is called in messages, and the names that each must define
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
    """Refuse an unknown name. Dotted import paths are checked when they are loaded."""
    import_path(kind, name)


def load(kind: str, name: str) -> ModuleType:
    """The module behind a name."""
    module_name = import_path(kind, name)
    _announce(kind, module_name)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError, SyntaxError) as error:
        if module_name != name:
            raise  # a module of this package: a missing dependency or a bug
        raise UserError(f"{KINDS[kind][0]} '{name}' cannot be imported: {error}") from error
    for part in KINDS[kind][1]:
        if not hasattr(module, part):
            raise _missing(kind, name, part)
    return module


def declaration(kind: str, name: str, part: str, default: Any = ...) -> Any:
    """The value of a name at a module's top level, read without importing the module (unless it already is).

    Without a default, an entry that does not define it is refused.
    """
    module_name = import_path(kind, name)
    module = sys.modules.get(module_name)
    _announce(kind, module_name)
    file = None if module else _file(module_name)
    if module is None and file is None:
        module = load(kind, name)  # no Python source found: importing gives the error
    try:
        found = getattr(module, part, ...) if file is None else _read(file, module_name, part)
    except Exception:  # importing the module gives the error
        found = getattr(load(kind, name), part, ...)
    if found is ... and default is ...:
        raise _missing(kind, name, part)
    return default if found is ... else found


def summary(kind: str, name: str) -> str:
    """The first line of a module's docstring, for listings."""
    file = _file(import_path(kind, name))
    text = ast.get_docstring(_parsed(file)) if file else load(kind, name).__doc__
    return (text or "").strip().partition("\n")[0]


def import_path(kind: str, name: str) -> str:
    """The import path behind a name; an unknown name is refused."""
    if name in entries(kind):
        return f"tico_ssl.{kind.replace('/', '.')}.{name.replace('-', '_')}"
    if "." in name:
        return name
    raise UserError(f"no {KINDS[kind][0]} is called '{name}'{suggestion(name, entries(kind))}")


@functools.cache
def _announce(kind: str, module_name: str) -> None:
    """Say once, before it happens, that a name brings in code from elsewhere: whoever wrote the recipe chose it."""
    root = module_name.partition(".")[0]
    if root == "tico_ssl" or module_name in sys.modules or not is_main():
        return
    with suppress(ValueError, ImportError):  # not the name of a module
        if importlib.util.find_spec(root) is not None:  # which imports nothing
            what = f"{KINDS[kind][0]} '{printable(module_name)}'"
            sys.stderr.write(f"note: {what} is code from outside this package, and runs now\n")


def _missing(kind: str, name: str, part: str) -> UserError:
    return UserError(f"'{name}' is not a valid {KINDS[kind][0]}: it has no '{part}'")


def _file(module_name: str) -> Path | None:
    """The source file of a module. Its parent packages are imported, the module is not."""
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
    """The value of a name, from only those statements of a module that it depends on; `...` if it is not defined."""
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
    module = ModuleType(module_name)
    module.__file__ = str(file)
    with _known(module):
        exec(compile(chosen, str(file), "exec"), module.__dict__)
    return module.__dict__[part]


@contextmanager
def _known(module: ModuleType) -> Iterator[None]:
    """For a moment, the module of its name: from Python 3.13 on, pydantic finds the meaning of fields only so."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


def _reduced(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """A statement; of an import, only the names needed: others may need torch."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return statement
    reduced = copy.copy(statement)
    reduced.names = [alias for alias in statement.names if _bound_by(alias) in names]
    return reduced


def _bound_by(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from map(_bound_by, statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
