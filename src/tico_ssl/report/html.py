"""HTML that is safe by construction: every string is text, and only `tag` makes markup."""

import html
import json
import math
from typing import Any

VOID = frozenset({"br", "img", "input", "meta"})


class Html(str):
    """Markup. Plain strings are escaped in a page; this is not."""

    __slots__ = ()


Child = str | float | None | list[Any]


def tag(element: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` is the attribute class, `data_x` data-x; True means without a value, None is omitted."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if element in VOID:
        return Html(f"<{element}{written}>")
    return Html(f"<{element}{written}>{joined(*children)}</{element}>")


def joined(*children: Child) -> Html:
    """Concatenated children: text is escaped, markup is not, lists are flattened, None is omitted."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, list):
            parts.append(joined(*child))
        elif isinstance(child, Html):
            parts.append(child)
        elif child is not None:
            parts.append(html.escape(str(child)))
    return Html("".join(parts))


def inline_json(values: Any) -> Html:
    """JSON inside a script element: nothing in it can end the element, and NaN is null."""
    text = json.dumps(_finite(values), separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _finite(values: Any) -> Any:
    """The same with None for NaN and infinity."""
    if isinstance(values, dict):
        return {str(key): _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
