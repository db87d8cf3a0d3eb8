"""The base of every part of a recipe: strict, frozen, documented by the strings under its fields."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.wording import counted


class Section(BaseModel):
    """A part of a recipe. Unknown keys and wrong types are errors; values do not change once read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class ViewShape(NamedTuple):
    """What a step gets as one view: an image of `side` pixels, or, with `pieces` above 0, a jigsaw of as many."""

    side: int
    pieces: int = 0


class MethodConfig(Section):
    """Settings that all methods have."""

    minimum_views: ClassVar[int] = 2

    name: str
    """File name under methods/, or a dotted import path."""

    def check_batch(self, batch: int, together: int) -> None:
        """Raise UserError if the method cannot take steps of `batch` images, of which `together` go through the
        networks at once: those of a process, or of one of its parts."""

    def check_views(self, views: Sequence[ViewShape]) -> None:
        """Raise UserError if the method cannot train on `views`. By default it needs `minimum_views` of them, images
        and not jigsaws, and further ones may be anything."""
        if len(views) < self.minimum_views:
            raise UserError(
                f"method {self.name} needs {counted(self.minimum_views, 'view')}, 'views' makes {len(views)}"
            )
        self.check_images(views[: self.minimum_views])

    def check_images(self, views: Sequence[ViewShape]) -> None:
        """Raise UserError if one of `views` is a jigsaw."""
        if jigsaws := [number for number, view in enumerate(views, 1) if view.pieces]:
            which = f"view {jigsaws[0]} of 'views' is a jigsaw"
            raise UserError(f"method {self.name} needs images, {which} (for method=pirl)")


S = TypeVar("S", bound=Section)


def validate(kind: type[S], values: dict[str, Any], where: str) -> S:
    """Build a section; an error is one line that names the key, where it is and what is valid."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_one_line(kind, error)}") from None


def _one_line(kind: type[Section], error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        text = f"unknown key '{key}'{_elsewhere(kind, key) or suggestion(path[-1], _fields_at(kind, path[:-1]))}"
    elif first["type"] == "model_type":
        fields = ", ".join(_fields_at(kind, path))
        text = f"'{key}' is a section, of which settings are given one by one, as {key}.KEY=VALUE; keys: {fields}"
    elif first["type"] == "missing":
        text = f"'{key}' is missing"
    elif first["type"] == "literal_error":
        text = f"'{key}' must be {first['ctx']['expected']}, got {first['input']!r}"
    else:
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        reason = reason.removeprefix("should be ").removeprefix("should have ")
        prefix = "must be " if first["msg"].startswith("Input should be ") else ""
        given = "" if isinstance(first["input"], dict | list) else f", got {first['input']!r}"
        text = f"'{key}' {prefix}{reason}{given}" if key else f"{reason}"
    more = error.error_count() - 1
    return text + (f" (and {more} more)" if more else "")


def _elsewhere(kind: type[Section], key: str) -> str:
    """'; did you mean training.epochs?' for a key that one of the sections has."""
    found = [f"{section}.{key}" for section in kind.model_fields if key in _fields_at(kind, [section])]
    return f"; did you mean '{found[0]}'?" if len(found) == 1 and "." not in key else ""


def _fields_at(kind: type[Section], path: list[str]) -> list[str]:
    """The valid keys at a path in a recipe, for suggestions."""
    current: Any = kind
    for part in path:
        if part.isdigit() or not hasattr(current, "model_fields") or part not in current.model_fields:
            continue
        current = section_type(current.model_fields[part].annotation)
    return list(getattr(current, "model_fields", {}))


def section_type(annotation: Any) -> Any:
    """The Section inside an annotation such as `list[ViewPolicy]` or `Blur | None`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := section_type(argument)) is not None:
            return found
    return None
