"""Recipes: all settings of a run in one typed tree.

A recipe is a packaged name (`cifar10/tico`), a YAML file, or a mapping. `base:` names another recipe to start from;
overrides (`training.epochs=5`, `views.*.blur=0`, `method=simclr`) come last. The same values give the same run, however
they were specified. A method other than the base's starts from its own defaults, unless its `Config` extends that of
the base's.
"""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model, model_validator

from tico_ssl.config import catalogue
from tico_ssl.config.section import MethodConfig, Section, ViewShape, validate
from tico_ssl.config.sections import (
    BACKBONE_LIBRARIES,
    IMAGENET_MEAN,
    BackboneConfig,
    DataConfig,
    OptimizerConfig,
    TrainingConfig,
)
from tico_ssl.config.views import ViewPolicy, named_policy
from tico_ssl.config.yaml_text import MOST_BYTES, dump_yaml, parse_yaml
from tico_ssl.runtime.errors import UserError, suggestion
from tico_ssl.runtime.wording import counted

Tell = Callable[[str], object]  # receives notes for the user

YAML = (".yaml", ".yml")
METHOD = "tico"  # default
LENGTHS = ("epochs", "batch_size")  # of training: whoever gives one means it, also where images are few
SHORT = {"method": "method.name", "data": "data.source", "backbone": "backbone.name", "optimizer": "optimizer.name"}


def _nobody(line: str) -> None:
    """Ignore a note."""


class Recipe(Section):
    """A whole run. The type of `method` is narrowed to the settings of the method that a recipe names."""

    description: str = ""
    """Purpose of this recipe, and the result to expect."""
    data: DataConfig = DataConfig()
    views: Annotated[list[ViewPolicy], Field(min_length=1)]
    backbone: BackboneConfig = BackboneConfig()
    method: MethodConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _parts(self) -> "Recipe":
        batch, parts = self.training.batch_size, self.training.parts
        if batch % parts:
            raise ValueError(f"training.parts {parts} does not divide {counted(batch, 'image')}")
        if batch == parts:
            raise ValueError(f"training.parts {parts} leaves 1 image per part, BatchNorm needs 2: at most {batch // 2}")
        return self

    @model_validator(mode="after")
    def _batch(self) -> "Recipe":
        """As far as one process takes all images: with several, each takes a part of these."""
        self.method.check_batch(self.training.batch_size, self.training.batch_size // self.training.parts)
        return self

    @model_validator(mode="after")
    def _library_and_model(self) -> "Recipe":
        """Whether the library has the model, only the library knows."""
        library, _, model = (name := self.backbone.name).partition("/")
        if library not in BACKBONE_LIBRARIES or not model:
            libraries = ", ".join(sorted(BACKBONE_LIBRARIES))
            raise ValueError(f"backbone.name '{name}' must be library/model with library one of {libraries}")
        return self

    @model_validator(mode="after")
    def _channels(self) -> "Recipe":
        for name in ("mean", "std"):
            values = getattr(self.data, name)
            if len(values) not in (0, len(IMAGENET_MEAN), self.backbone.channels):  # 0 and 3: found in the images
                raise ValueError(f"data.{name} has {len(values)} values for backbone.channels {self.backbone.channels}")
        return self

    @model_validator(mode="after")
    def _views(self) -> "Recipe":
        shapes = [(ViewShape(view.side(self.data.image_size), view.jigsaw**2), view.count) for view in self.views]
        self.method.check_views([shape for shape, count in shapes for _ in range(count)])
        return self


def load_recipe(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, tell: Tell = _nobody
) -> Recipe:
    """The recipe of a name, a file or a mapping, with overrides, checked. `tell` receives a line about settings that
    were dropped because the method was changed."""
    notes: list[str] = []
    values, where = _raw(source, notes)
    changes = {full_key(key, value): value for key, value in (overrides or {}).items()}
    values = _with_method(values, changes.get("method.name"), notes)
    if not changes.keys().isdisjoint(f"training.{length}" for length in LENGTHS):
        changes = {"training.least_steps": 0} | changes
    for key, value in changes.items():
        values = _overridden(values, key.split("."), value, key)
    if isinstance(values.get("views"), str):
        values["views"] = named_policy(values["views"])
    method = values.get("method", {})
    if not isinstance(method, dict) or not isinstance(method.get("name", ""), str):
        raise UserError(f"{where}: 'method' must be a mapping with a name")
    kind = catalogue.declaration("methods", method.get("name", METHOD), "Config")
    recipe = validate(_with_settings(kind), values | {"method": method}, where)
    for note in notes:
        tell(note)
    return recipe


@functools.cache
def _with_settings(kind: type[MethodConfig]) -> type[Recipe]:
    """A recipe whose method has these settings."""
    return create_model("Recipe", __base__=Recipe, method=(kind, ...))


def packaged_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    root = Path(str(resources.files("tico_ssl") / "recipes"))
    names = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith(("studies/", "views/")))


def recipe_summary(name: str) -> str:
    """The description of a recipe, for a listing; the rest is not checked."""
    return str(_raw(name, [])[0].get("description", "")).strip()


def is_override(word: str) -> bool:
    """Whether a word of a command is key=value. Keys have no slashes, so runs/lr=0.1 is a path; lr=0.1.yaml is one if
    there is such a file."""
    key, equals, _ = word.partition("=")
    is_path = "/" in key or os.sep in key or (Path(word).suffix in YAML and Path(word).is_file())
    return bool(equals) and not is_path


def parse_override(text: str) -> tuple[str, Any]:
    """'training.epochs=5' as key and value; the value is parsed as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"'{text}' is not of the form key=value")
    return key, parse_yaml(value, f"override {key}")


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, itself a valid recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _raw(
    source: str | Path | Mapping[str, Any], notes: list[str], above: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """The values of a recipe merged over those of its base."""
    if isinstance(source, Mapping):
        values, where = _deep_copy(dict(source)), "recipe"
    else:
        text, where = _text(str(source))
        values = parse_yaml(text, where)
        if not isinstance(values, dict):
            raise UserError(f"{where}: a recipe is a mapping of sections")
    base = values.pop("base", None)
    if str(base) in above:
        raise UserError(f"{where}: circular base ({' -> '.join((*above, str(base)))})")
    if not base:
        return values, where
    below, _ = _raw(base, notes, (*above, str(base)))
    if isinstance(training := values.get("training"), dict) and not training.keys().isdisjoint(LENGTHS):
        values["training"] = {"least_steps": 0} | training
    method = values.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    return _merged(_with_method(below, name, notes), values), where


def _text(name: str) -> tuple[str, str]:
    """The YAML of a recipe. Names with underscores are an older spelling."""
    known = name if Path(name).suffix in YAML else name.replace("_", "-")
    return yaml_text(known, "recipe", "recipes", packaged_recipes())


def yaml_text(name: str, kind: str, folder: str, packaged: list[str]) -> tuple[str, str]:
    """The text of a YAML file, or of one that comes with the package, and how to call it in an error message."""
    path = Path(name).expanduser()
    if path.suffix in YAML:
        if not path.is_file():
            raise UserError(f"there is no {kind} file {name}")
        try:
            with path.open("rb") as file:
                return file.read(MOST_BYTES + 1).decode(), name
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: not UTF-8 text ({error})") from error
    if name not in packaged:
        raise UserError(f"no {kind} is called '{name}'{suggestion(name, packaged)}")
    return (resources.files("tico_ssl") / folder / f"{name}.yaml").read_text(encoding="utf-8"), f"{kind} {name}"


def full_key(key: str, value: Any) -> str:
    """`method=simclr` is short for `method.name=simclr`, `data=photos/` for `data.source=photos/`."""
    return SHORT.get(key, key) if isinstance(value, str) else key


def _with_method(values: dict[str, Any], name: Any, notes: list[str]) -> dict[str, Any]:
    """The values with a method of this name: a different method starts from its own defaults, unless it extends the one
    before."""
    given = values.get("method", {})
    if not isinstance(name, str) or not isinstance(given, dict) or name == (old := given.get("name", METHOD)):
        return values
    if _extends(name, old):
        return values | {"method": given | {"name": name}}
    dropped = [key for key in given if key != "name"]
    if dropped:
        notes.append(f"method {name} starts from its own defaults: {', '.join(dropped)} of {old} are dropped")
    return values | {"method": {"name": name}}


def _extends(name: str, old: Any) -> bool:
    """Whether a method has the settings of another one, and further ones: its `Config` is derived from the other's."""
    if not isinstance(old, str):
        return False
    with suppress(UserError):  # a method that is replaced in the end need not exist
        kind = catalogue.declaration("methods", name, "Config")
        other = (catalogue.import_path("methods", old), "Config")
        return any((base.__module__, base.__name__) == other for base in kind.__mro__)
    return False


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _overridden(values: Any, path: list[str], value: Any, key: str) -> Any:
    """A copy of nested mappings and lists with the value at a path replaced; `*` means every item of a list."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if head == "views" and rest and isinstance(values, dict) and isinstance(values.get("views"), str):
        values = values | {"views": named_policy(values["views"])}
    if isinstance(values, list):
        places = range(len(values)) if head == "*" else [i for i in range(len(values)) if head == str(i)]
        if not places:
            raise UserError(f"override '{key}': '{head}' must be * or a number from 0 to {len(values) - 1}")
        return [_overridden(item, rest, value, key) if i in places else item for i, item in enumerate(values)]
    if values is not None and not isinstance(values, dict):
        raise UserError(f"override '{key}': '{head}' is inside a plain value")
    values = dict(values or {})
    values[head] = _overridden(values.get(head), rest, value, key)
    return values


def _deep_copy(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _deep_copy(value) for key, value in values.items()}
    return [_deep_copy(value) for value in values] if isinstance(values, list | tuple) else values
