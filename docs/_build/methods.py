"""The page of all methods: what each file says of itself, its settings, its recipes."""

import ast
import json
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from tables import code, table

from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe, packaged_recipes

INTRODUCTION = """# Methods and their settings

Each method's docstring, its settings with their defaults, and the recipes that use it, generated from
`src/tico_ssl/methods/`. A recipe may override the defaults; `tico describe RECIPE` prints its values.
[Methods](../methods.md) compares the methods, lists where they depart from their publications, and explains what they
log.
"""


def page() -> str:
    """The page in Markdown."""
    used = uses()
    return "\n\n".join([INTRODUCTION, *(section(name, used.get(name, [])) for name in catalogue.entries("methods"))])


def uses() -> dict[str, list[str]]:
    """The recipes of each method."""
    found: dict[str, list[str]] = {}
    for name in packaged_recipes():
        found.setdefault(load_recipe(name, {"data.source": "photos"}).method.name, []).append(name)
    return found


def section(name: str, recipes: list[str]) -> str:
    """One method."""
    file = catalogue.PACKAGE / "methods" / f"{name.replace('-', '_')}.py"
    return "\n\n".join([f"## {name}", about(file), settings(name), "Recipes: " + ", ".join(map(code, recipes)) + "."])


def about(file: Path) -> str:
    """The docstring of a file: its paragraphs, and what is indented as code."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or "").strip()


def settings(name: str) -> str:
    """The fields of a method's Config but its name."""
    fields = catalogue.declaration("methods", name, "Config").model_fields.items()
    rows = [
        (code(f"method.{key}"), code(kind(field)), code(default(field)), field.description or "")
        for key, field in fields
        if key != "name"
    ]
    return table(["setting", "type", "default", "meaning"], rows)


def kind(field: FieldInfo) -> str:
    """The type of a field and its limits, as a reader writes them: `float >= 0, < 1`."""
    limits = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(limit, name, None) is not None
    ]
    return " ".join([spelled(field.annotation), ", ".join(limits)]).strip()


def spelled(kind: Any) -> str:
    """A type without the module it is from; of choices, the values."""
    if kind is type(None):
        return "null"
    if get_origin(kind) is None:
        return str(getattr(kind, "__name__", kind))
    parts = [part for part in get_args(kind) if not hasattr(part, "ge")]
    if all(isinstance(part, str | int) for part in parts):  # a Literal
        return " or ".join(map(str, parts))
    name = getattr(get_origin(kind), "__name__", "")
    if name in ("tuple", "list"):
        return f"{name} of {spelled(parts[0])}"
    return " or ".join(spelled(part) for part in parts)


def default(field: FieldInfo) -> str:
    """A default as a recipe has it."""
    value = field.get_default(call_default_factory=True)
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
