"""Catalogues and annotated recipes, for `tico list` and `tico describe`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tico_ssl.config import catalogue
from tico_ssl.config.recipe import load_recipe, packaged_recipes, recipe_summary
from tico_ssl.config.section import Section
from tico_ssl.config.study import load_study, packaged_studies
from tico_ssl.config.views import packaged_policies, policy_summary
from tico_ssl.data import formats
from tico_ssl.evaluations._cost import cost_of
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.progress import console

Entries = list[tuple[str, str]]


def _modules(kind: str) -> Entries:
    return [(name, catalogue.summary(kind, name)) for name in catalogue.entries(kind)]


def _evaluations() -> Entries:
    """With what each costs, which is the order of `tico evaluate RUN all`."""
    return [(name, f"{cost_of(name):<8}  {text}") for name, text in _modules("evaluations")]


def _backbones() -> Entries:
    from tico_ssl.networks import backbones  # the only list that needs the libraries behind it

    return [(name, "") for library in sorted(backbones.LIBRARIES) for name in backbones.catalogue(library)]


def _data() -> Entries:
    """Data sets by name, then formats of a path; the prefix is only needed where another format would be detected."""
    named = formats.names()
    unlisted = {*named.values(), "dataset"}  # a Python object has no name on the command line
    paths = [name for name in catalogue.entries(formats.KIND) if name not in unlisted]
    about = [*named.items()] + [(f"{name}:PATH", name) for name in paths]
    return [(name, catalogue.summary(formats.KIND, format)) for name, format in about]


CATALOGUES: dict[str, Callable[[], Entries]] = {
    "recipes": lambda: [(name, recipe_summary(name)) for name in packaged_recipes()],
    "studies": lambda: [(name, load_study(name).description) for name in packaged_studies()],
    "methods": lambda: _modules("methods"),
    "views": lambda: [(name, policy_summary(name)) for name in packaged_policies()],
    "data": _data,
    "backbones": _backbones,
    "evaluations": _evaluations,
    "exporting": lambda: _modules("exporting"),
}


def print_catalogue(what: str, search: str = "") -> None:
    """One catalogue, or all but the long list of backbones."""
    if what != "all" and what not in CATALOGUES:
        raise UserError(f"unknown list '{what}'{suggestion(what, CATALOGUES)}")
    for kind in CATALOGUES if what == "all" else [what]:
        if what == "all":
            console.print(f"{kind}", style="bold")
        if what == "all" and kind == "backbones":
            console.print("  more than a thousand: tico list backbones [TEXT]")
            continue
        entries = [(name, text) for name, text in CATALOGUES[kind]() if search in name]
        if not entries:
            raise UserError(f"no name among the {kind} contains '{search}'")
        width = max((len(name) for name, _ in entries), default=0)
        for name, text in entries:
            console.print(f"  {name:<{width}}  {text}".rstrip())


def describe(name: str, changes: Mapping[str, Any]) -> str:
    """An annotated recipe or study with overrides; notes about dropped settings are comments at the top."""
    if name in packaged_studies():
        return described(load_study(name, changes))
    notes: list[str] = []
    recipe = load_recipe(name, changes, notes.append)
    return "\n".join([*(f"# {note}" for note in notes), described(recipe)])


def described(recipe: Section) -> str:
    """A recipe or a study as YAML with the meaning of every field as a comment."""
    return "\n".join(_lines(recipe, 0))


def _lines(section: Section, depth: int) -> list[str]:
    indent, lines = "  " * depth, []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        about = " ".join((field.description or "").split())
        if isinstance(value, Section):
            lines += ["", f"{indent}# {(type(value).__doc__ or '').splitlines()[0]}", f"{indent}{name}:"]
            lines += _lines(value, depth + 1)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Section):
            lines += ["", f"{indent}# {(type(value[0]).__doc__ or '').splitlines()[0]}", f"{indent}{name}:"]
            lines += [line for item in value for line in _item(item, depth)]
        else:
            text = f"{indent}{name}: {json.dumps(_plain(value), ensure_ascii=False)}"
            lines.append(f"{text:<44}  # {about}" if about else text)
    return lines


def _item(section: Section, depth: int) -> list[str]:
    first, *rest = [line for line in _lines(section, depth + 2) if line]
    indent = "  " * (depth + 1)
    return [f"{indent}- {first.strip()}", *rest]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
